"""The headlines of five papers and talks: each published figure, and the benchmark's figure that stands beside it."""

from __future__ import annotations

from dataclasses import dataclass

_CURVE = "curve without numbers in the text"
_NO_NUMBER = "no number"
_STREAM_RATES = ((1, 903.41), (2, 954.84), (4, 990.91), (8, 953.43))


@dataclass(frozen=True)
class Row:
    """One line of a table.

    :param published: figure and unit as published. :param number: the same in the unit of ours, where they compare.
    :param program: script that measures ours; "" where none does. :param figure: its name; ``*`` stands for any text.
    :param absent: why there is no figure, where no script measures it or its script leaves it out.
    """

    what: str
    published: str
    program: str = ""
    figure: str = ""
    number: float | None = None
    absent: str = ""


@dataclass(frozen=True)
class Headline:
    """One group of published figures.

    :param source: title and place of the paper or talk. :param setup: of the published measurement.
    :param comparable: one sentence on the figures that compare and those that do not.
    :param curve: streams -> published rate in Mbit/s, to be drawn with the stream model.
    :param timeline: the picture of CPU slots and data slots belongs here. :param pictures: files of benchmarks.
    """

    title: str
    source: str
    setup: str
    comparable: str
    rows: tuple[Row, ...]
    curve: tuple[tuple[int, float], ...] = ()
    timeline: bool = False
    pictures: tuple[str, ...] = ()


_KANGAROO = "Kangaroo with several routes (Rajamani, Balakrishnan; University of Wisconsin-Madison)"
_DISKROUTER = "DiskRouter (Kola; talk, University of Wisconsin-Madison)"
_ADAPT = "ADAPT (Chervenak, Sim and others; USC and Berkeley Lab; talk)"
_PROFILING = "Profiling Grid Data Transfer Protocols and Servers (Kola, Kosar, Livny; University of Wisconsin-Madison)"
_GLOBUS = "Condor with Globus Online (Miller), glideinWMS (Mhashilkar), data-flow parallelism (Yildirim); talks of 2011"

HEADLINES: tuple[Headline, ...] = (
    Headline(
        "Five hops, put and get",
        _KANGAROO,
        "Ten files of 8,642,560 bytes, one after the other, to and from a server five hops away.",
        "The size of the files and the number of hops are the same; our hops are emulated links of 4 MB/s and 10 ms, "
        "and a quick run sends three files, so only the share of one hop compares.",
        (
            Row("put of several files over five hops", f"{_CURVE}; faster than with one route", "overlay_hops",
                "five_hops: put, relays, 5 hops, * files"),
            Row("put over five hops, share of one hop", _NO_NUMBER, "overlay_hops",
                "five_hops: put, 5 hops of one, * files"),
            Row("get of several files over five hops", f"{_CURVE}; 2 servers asked in place of 5", "overlay_hops",
                "five_hops: get, relays, 5 hops, * files"),
            Row("get over five hops, share of one hop", _NO_NUMBER, "overlay_hops",
                "five_hops: get, 5 hops of one, * files"),
            Row("computing and moving at once: the writer is free after", _NO_NUMBER, "overlay_hops",
                "overlap: custodians: the writer is free"),
            Row("computing and moving at once: everything is delivered after", _NO_NUMBER, "overlay_hops",
                "overlap: custodians: everything is delivered"),
        ),
    ),
    Headline(
        "Head-of-line blocking",
        _KANGAROO,
        "Eighteen writers of 8 MB each by two routes, with a rename at the end of each file.",
        "Writers, routes and renames are the same; the published renames of the queue with one route came between "
        "1,600 and 1,700 s, at rates that nobody published, so the delay of a rename compares only in kind. Our one "
        "queue is a single writer that sends all files by one route, and then renames them all.",
        (
            Row("renames of one queue for all, first to last", "100 s (1,600 to 1,700 s)", "overlay_hops",
                "eighteen: one queue for all: renames, first to last"),
            Row("one queue for all: a rename after its file's last byte, median", _CURVE, "overlay_hops",
                "eighteen: one queue for all: a rename after the last byte: median"),
            Row("a rename after its file's last byte, median", _CURVE, "overlay_hops",
                "eighteen: a rename after the last byte, others still write: median"),
            Row("a rename after its file's last byte, longest", _CURVE, "overlay_hops",
                "eighteen: a rename after the last byte, others still write: longest"),
            Row("another writer's end stops for ever: the rest is later by", _NO_NUMBER, "overlay_hops",
                "eighteen: another flow's end stops for ever: later by"),
            Row("rate of the other seventeen writers", _NO_NUMBER, "overlay_hops",
                "eighteen: 17 writers, relays, two routes"),
        ),
    ),
    Headline(
        "Failure of a route",
        _KANGAROO,
        "Two senders of five files of 8 MB each; one of two servers on the way stands still for ten minutes.",
        "The failure is the same at a shorter scale; the published curve has no delay of single files, so our delays "
        "stand alone. Four of our files know only the custodian that stops, as all files did with one route.",
        (
            Row("files of one route that waited for the failed server", "4, which arrived between 600 and 800 s",
                "overlay_hops", "away: files of one route that waited"),
            Row("the last of these arrived after", "800 s", "overlay_hops",
                "away: the last file of one route there after"),
            Row("one custodian stands still for", "600 s", "overlay_hops",
                "away: a custodian stands still: ten minutes, 1:*"),
            Row("files that arrived meanwhile by the other one", _CURVE, "overlay_hops",
                "away: files that arrived meanwhile by the other, of *"),
            Row("all files are there after", _CURVE, "overlay_hops", "away: all files there after"),
            Row("it is back: its spool is empty after", _NO_NUMBER, "overlay_hops",
                "away: it is back: its spool is empty after"),
            Row("it is back: names or contents that changed", _NO_NUMBER, "overlay_hops",
                "away: it is back: names or contents that changed"),
            Row("one of two relays is killed in the middle: later than ideal", _NO_NUMBER, "overlay_routes",
                "a relay is killed: later than ideal"),
            Row("one of two links falls silent: later than ideal", _NO_NUMBER, "overlay_routes",
                "a link falls silent: later than ideal"),
        ),
    ),
    Headline(
        "One large file over a long way",
        _DISKROUTER,
        "One file of 1 GB from San Diego to Urbana-Champaign: 12.5 MB/s at the narrowest link, 67 ms.",
        "Rate and round trip of our emulated link are the published ones, and its losses and its TCP are not; our "
        "files are smaller (32 and 64 MiB in a quick run, 128 and 256 MiB in a full one), so beginnings "
        "count more.",
        (
            Row("scp", "0.66 MB/s", absent="it needs an SSH server, which tools/install does not install"),
            Row("GridFTP, 1 stream, windows of 64 KiB", "0.85 MB/s", "overlay_gridftp",
                "windows of 64 KiB: GridFTP, 1 stream", 0.85),
            Row("GridFTP, 10 streams, windows of 64 KiB", "3.52 MB/s", "overlay_gridftp",
                "windows of 64 KiB: GridFTP, 10 streams", 3.52),
            Row("DiskRouter; here: put, windows of 64 KiB", "10.77 MB/s", "overlay_gridftp",
                "windows of 64 KiB: put", 10.77),
            Row("GridFTP, 1 stream, the kernel's windows", "0.85 MB/s", "overlay_gridftp",
                "the kernel's windows: GridFTP, 1 stream", 0.85),
            Row("GridFTP, 10 streams, the kernel's windows", "3.52 MB/s", "overlay_gridftp",
                "the kernel's windows: GridFTP, 10 streams", 3.52),
            Row("DiskRouter; here: put, the kernel's windows", "10.77 MB/s", "overlay_gridftp",
                "the kernel's windows: put", 10.77),
            Row("put that chooses its connections, a larger file", "10.77 MB/s", "overlay_wan", "default: put", 10.77),
            Row("put with one connection", _NO_NUMBER, "overlay_wan", "1: put"),
            Row("put with four connections", _NO_NUMBER, "overlay_wan", "4: put"),
            Row("get that chooses its connections", _NO_NUMBER, "overlay_wan", "get"),
            Row("get, one packet of a thousand is lost", _NO_NUMBER, "overlay_wan", "get bbr, 0.1 % lost"),
        ),
    ),
    Headline(
        "Several routes, and a buffer in the middle",
        _DISKROUTER,
        "Pictures of transfers by several routes, and of a router between two halves that fluctuate independently.",
        "The talk shows pictures without numbers in its text, so the figures show only that the effect exists here.",
        (
            Row("two equal routes, share of their sum", _CURVE, "overlay_routes", "equal: of the sum"),
            Row("two equal routes", _CURVE, "overlay_routes", "equal: both"),
            Row("two routes, 4 to 1, share of their sum", _CURVE, "overlay_routes", "4 to 1: of the sum"),
            Row("a custodian between fluctuating halves: gain over a relay", _NO_NUMBER, "overlay_hops",
                "middle: gain of a custodian in the middle over a relay"),
            Row("a custodian between fluctuating halves: gain over no router", _NO_NUMBER, "overlay_hops",
                "middle: gain of a custodian in the middle over no router"),
            Row("3 TB from SRB to UniTree by Stork, GridFTP beside DiskRouter", _CURVE,
                absent="it needs two tape archives, SRB and UniTree"),
        ),
    ),
    Headline(
        "Streams that adapt, and a policy service",
        _ADAPT,
        "488 files, 260 GB. First testbed: 8 clients, at most 128 streams in all, 32 for each. Second: one client "
        "between Daejeon and Oakland, 160 to 1,024 streams, beside 1,024 at once; about 20 % less time.",
        "Settings and numbers of files are the published ones (a quick run has 192 files); the server is a model of "
        "an overloaded disk server with files of 0.5 MB and a quarter of the streams, so only ratios of times compare, "
        "and the published 0.8 is that of one client.",
        (
            Row("one client, ADAPT over all streams at once", "about 0.8", "adapt",
                "one client: ADAPT over all at once", 0.8),
            Row("one client, ours over all streams at once", "about 0.8", "adapt",
                "one client: ours over all at once", 0.8),
            Row("8 clients, client side, slow increase", _CURVE, "adapt",
                "8 clients: ADAPT, client side, slow increase over all at once"),
            Row("8 clients, client side, fast increase", _CURVE, "adapt",
                "8 clients: ADAPT, client side, fast increase over all at once"),
            Row("8 clients, policy side, slow increase", _CURVE, "adapt",
                "8 clients: ADAPT, policy side, slow increase over all at once"),
            Row("8 clients, policy side, fast increase", _CURVE, "adapt",
                "8 clients: ADAPT, policy side, fast increase over all at once"),
            Row("8 clients, ours with the policy service", _NO_NUMBER, "adapt",
                "8 clients: ours, policy service, fast settings over all at once"),
            Row("8 clients, ours without a policy service", _NO_NUMBER, "adapt",
                "8 clients: ours, no policy service over all at once"),
        ),
    ),
    Headline(
        "Streams, files at once and the cost of a server",
        _PROFILING,
        "GridFTP 2.4.3 and NeST on an Athlon of 1.66 GHz with 100 Mbit/s, one client that moves files of 100 MB.",
        "Client and server share this machine over the loopback interface, which is much faster than 100 Mbit/s, so "
        "the rates show other bottlenecks; the direction of the effect of streams compares.",
        (
            Row("GridFTP, upload", "7.83 MB/s", "profiles", "GridFTP: best upload"),
            Row("GridFTP, download", "6.45 MB/s", "profiles", "GridFTP: best download"),
            Row("NeST, upload; here: our router", "5.5 MB/s", "profiles", "router: best upload"),
            Row("NeST, download; here: our router", "7.49 MB/s", "profiles", "router: best download"),
            Row("GridFTP over 60 ms, upload: the best of 1 to 8 streams or files", _CURVE, "profiles",
                "GridFTP-far: best upload", absent="not enough data: a quick run is too short for 60 ms"),
            Row("server's CPU of an upload with 4 streams", f"{_CURVE}; lower than with one", "profiles",
                "GridFTP: server's CPU, upload, 4 streams"),
            Row("server's CPU of a download with 4 streams", _CURVE, "profiles",
                "GridFTP: server's CPU, download, 4 streams"),
        ),
        pictures=("profile-GridFTP.png", "profile-GridFTP-far.png"),
    ),
    Headline(
        "The cost of reserved space",
        _PROFILING,
        "NeST with its lots beside GridFTP: uploads of files of 100 MB were 30 % slower.",
        "NeST checked and recorded a quota at each write, and our lots allocate the space; both shares are those of "
        "the write rate, and that of a directory is shown only where it differs clearly from noise.",
        (
            Row("share of the write rate, a lot of our router", "0.30", "overlay_lots",
                "cost of the lot, median of pairs", 0.3),
            Row("rate of a put out of a lot", "5.5 MB/s", "overlay_lots", "put of 512 MiB to the disk out of a lot"),
            Row("share of the write rate, space reserved in a directory", "0.30", "profiles",
                "directory: share of the write rate that reserving space costs", 0.3,
                absent="not enough data: the difference is no larger than the noise"),
        ),
    ),
    Headline(
        "The model of streams",
        _GLOBUS,
        "Disk to disk over 10 Gbit/s between two clusters: 1 to 8 streams gave 903, 955, 991 and 953 Mbit/s; striped "
        "over two nodes 4,229 Mbit/s.",
        "The formula is the same and the links are not, so we compare the number of streams that it chooses with the "
        "best number on each emulated link; the rule as published stands beside, from the same samples.",
        (
            Row("share of the best rate that is lost: 10 MB/s, 10 ms", _NO_NUMBER, "estimator",
                "rate: *: below the best rate"),
            Row("share of the best rate that is lost: 100 ms, small windows", _NO_NUMBER, "estimator",
                "RTT: *: below the best rate"),
            Row("share of the best rate that is lost: downloads", _NO_NUMBER, "estimator",
                "downloads: *: below the best rate"),
            Row("streams over the fewest that suffice: 100 ms, small windows", _NO_NUMBER, "estimator",
                "RTT: *: streams over the fewest for 97 %"),
            Row("streams over the fewest that suffice: downloads", _NO_NUMBER, "estimator",
                "downloads: *: streams over the fewest for 97 %"),
            Row("share of the bytes that went into samples: 100 ms", _NO_NUMBER, "estimator",
                "RTT: *: share of the bytes"),
            *(
                Row(f"100 ms, small windows: rate of {streams} stream{'s' * (streams > 1)}", f"{published:.0f} Mbit/s",
                    "estimator", f"RTT: *: rate of {streams} streams")
                for streams, published in _STREAM_RATES
            ),
            Row("striping over two nodes; here: two relays behind two links of 4 MB/s",
                "4,229 Mbit/s; 991 Mbit/s over one", "overlay_routes", "equal: both"),
        ),
        curve=_STREAM_RATES,
    ),
    Headline(
        "One Globus task for all files of a job",
        _GLOBUS,
        "Condor started the plugin once for each file; the talk proposes one transfer for all and has no figures.",
        "The service is emulated: a task starts after 2 s and a request takes 50 ms, both assumed, so the numbers of "
        "tasks and requests compare, and the time only under these assumptions.",
        (
            Row("tasks for all files of one call", "one for each file", "globus_batching",
                "tasks for * files of one call"),
            Row("requests to the service for each file", _NO_NUMBER, "globus_batching",
                "requests to the service per file"),
            Row("time until all files are verified", _NO_NUMBER, "globus_batching",
                "time until all files are verified"),
        ),
    ),
    Headline(
        "CPU slots and data slots",
        _GLOBUS,
        "The glideinWMS talk draws the plan: the next job starts when the one before begins to send its output.",
        "The talk has no figures, so HTCondor as it comes, with the same jobs, is the only comparison.",
        (
            Row("CPU slot held after a job's end, median", _NO_NUMBER, "demo", "slot held after a job's end, median"),
            Row("CPU slots free for other work after", _NO_NUMBER, "demo", "CPU slots free for other work after"),
            Row("all output delivered after", _NO_NUMBER, "demo", "all output delivered after"),
        ),
        timeline=True,
    ),
)  # fmt: skip
