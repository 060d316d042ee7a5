"""HTCondor's requests: parse the command line and the input file into one list of items."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from stageout.core.classad_parser import parse_ads
from stageout.core.classads import ClassAd, ClassAdSyntaxError, decode
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.abilities import Abilities
from stageout.plugin.api import Request
from stageout.plugin.urls import encode_url, is_url, safe_url, split_scheme

USAGE = "usage: PLUGIN -classad, or -infile FILE -outfile FILE [-upload | -delete], or SOURCE DESTINATION"


class Call(NamedTuple):
    """One call of the plugin.

    :param infile: "" in the single-file form. :param outfile: "" when results go to stdout.
    :param delete: delete the files at the URLs; HTCondor never asks for this.
    :param single: source and destination of the single-file form.
    :param problem: why the arguments are invalid, "" if they are valid.
    """

    infile: str = ""
    outfile: str = ""
    upload: bool = False
    delete: bool = False
    single: tuple[str, ...] = ()
    problem: str = ""


class Item:
    """One requested file.

    :param file_name: local name exactly as in HTCondor's request. :param method: the key of its statistics.
    :param shown_url: without secrets. :param refused: why the transfer cannot start.
    :param given: the original ``PluginData`` and ``METHOD_PluginData``, for a hand-off.
    """

    __slots__ = ("file_name", "given", "method", "refused", "request", "shown_url")

    def __init__(
        self,
        request: Request,
        file_name: str,
        method: str,
        shown_url: str,
        refused: TransferFailure | None = None,
        given: ClassAd | None = None,
    ) -> None:
        self.request = request
        self.file_name = file_name
        self.method = method
        self.shown_url = shown_url
        self.refused = refused
        self.given = ClassAd() if given is None else given


def parse_arguments(arguments: list[str]) -> Call:
    """Parse the command line. Never raises; ``problem`` has the error."""
    if len(arguments) == 2 and not arguments[0].startswith("-"):
        source, destination = arguments
        if not is_url(source) and not is_url(destination):
            return Call(problem=f"neither {source!r} nor {destination!r} is a URL; {USAGE}")
        return Call(single=(source, destination), upload=not is_url(source))
    values = {"-infile": "", "-outfile": ""}
    asked: set[str] = set()
    unknown = []
    rest = iter(arguments)
    for argument in rest:
        if argument in values:
            values[argument] = next(rest, "")
        elif argument in ("-upload", "-delete"):
            asked.add(argument)
        else:
            unknown.append(argument)
    problem = f"arguments not understood: {' '.join(unknown)}; {USAGE}" if unknown else ""
    if not problem and (len(asked) > 1 or not all(values.values())):
        problem = USAGE
    return Call(values["-infile"], values["-outfile"], "-upload" in asked, "-delete" in asked, problem=problem)


class Reader:
    """Parser of ads into items.

    :param destination: returns the job's destination to which HTCondor has appended a raw name, by URL and direction
        (True: upload). Called only if names need it.
    """

    def __init__(self, abilities: Abilities, call: Call, destination: Callable[[str, bool], str]) -> None:
        self._abilities = abilities
        self._upload = call.upload
        self._delete = call.delete
        self._destination = destination
        self._shared: ClassAd = ClassAd()
        self._taken: dict[str, str] = {}

    def items(self, ads: Iterable[ClassAd]) -> Iterator[Item]:
        """Parse the requested files. Ads without ``Url`` contain data for the following files."""
        index = 0
        for ad in ads:
            if "Url" not in ad and "LocalFileName" not in ad:
                self._shared.update(ad)
                continue
            yield self.item(ad, index)
            index += 1

    def item(self, ad: ClassAd, index: int) -> Item:
        """Parse one file ad."""
        url, file_name = ad.text("Url"), ad.text("LocalFileName")
        method = split_scheme(url).method if is_url(url) else ""
        given = self._given(ad, method)
        data = _merged(given)
        destination = self._base(url, data)
        encoded = encode_url(url, destination)
        request = Request(url, os.path.join(os.getcwd(), file_name), index, data, encoded)
        refused = self._refusal(url, file_name, method) or _fragment(destination)
        return Item(request, file_name, method or "none", safe_url(encoded), refused, given)

    def _given(self, ad: ClassAd, method: str) -> ClassAd:
        """Merge data of the whole call (protocol 4) with that of the file (protocol 2)."""
        given = ClassAd()
        for source in (self._shared, ad):
            for name in ("PluginData", f"{method}_PluginData"):
                value, before = source.get(name), given.get(name)
                if isinstance(value, ClassAd) and isinstance(before, ClassAd):
                    given[name] = ClassAd({**before, **value})
                elif value is not None:
                    given[name] = value
        return given

    def _base(self, url: str, data: dict[str, Any]) -> str:
        """Return the destination to which HTCondor has appended a raw name; "" if the name needs no encoding."""
        plain = not set(url) & set(" #?%") and url.isascii() and "//" not in url.partition("://")[2]
        if os.environ.get("STAGEOUT_MOVER") or plain:
            return ""  # a handed-off URL is encoded already
        given = data.get("StageOutDestination") if self._upload else None
        found = given if isinstance(given, str) else self._destination(url, self._upload)
        return found if url.startswith(found) else ""

    def _refusal(self, url: str, file_name: str, method: str) -> TransferFailure | None:
        if self._abilities.missing_requirement:
            return TransferFailure(ErrorClass.PLUGIN_BROKEN, self._abilities.missing_requirement)
        if not url or not file_name:
            return TransferFailure(ErrorClass.BAD_REQUEST, "Url and LocalFileName of a request must be strings")
        if not method:
            return TransferFailure(ErrorClass.BAD_URL, "not a URL: write scheme://host/path")
        methods = self._abilities.methods
        if methods and method not in map(str.lower, methods):
            text = f"{method} is not for this plugin, which moves {', '.join(methods)}"
            return TransferFailure(ErrorClass.NOT_SUPPORTED, text)
        if self._delete:
            text = f"this plugin cannot delete {method} URLs"
            return None if method in self._abilities.deletes else TransferFailure(ErrorClass.NOT_SUPPORTED, text)
        if not (self._abilities.upload if self._upload else self._abilities.download):
            word = "upload to" if self._upload else "download from"
            return TransferFailure(ErrorClass.NOT_SUPPORTED, f"this plugin cannot {word} {method} URLs")
        return self._local_refusal(url, file_name)

    def _local_refusal(self, url: str, file_name: str) -> TransferFailure | None:
        name = os.path.basename(file_name.rstrip("/"))
        if self._upload:
            if os.path.isfile(file_name) or os.path.isdir(file_name):
                return None
            problem = "is not an ordinary file" if os.path.exists(file_name) else "does not exist"
            return TransferFailure(ErrorClass.LOCAL_FILE, f"{name} {problem}; check transfer_output_files")
        first = self._taken.setdefault(os.path.normpath(file_name), url)
        if first is url:
            return None
        text = f"{safe_url(first)} is written to the same file {name}; rename one (transfer_input_remaps)"
        return TransferFailure(ErrorClass.CONFLICT, text)


def _fragment(destination: str) -> TransferFailure | None:
    """Refuse a destination with a fragment. Servers never get the fragment, so all files would have the same name."""
    if "#" not in destination:
        return None
    return TransferFailure(ErrorClass.BAD_URL, f"{safe_url(destination)}#... has a fragment: write %23 for #")


def _merged(given: ClassAd) -> dict[str, Any]:
    """Merge the attributes of all ads. A value that is no ad keeps its name."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        found.update(value if isinstance(value, ClassAd) else {name: value})
    return found


def read_items(call: Call, abilities: Abilities, destination: Callable[[str, bool], str]) -> list[Item]:
    """Parse all files of a call, each with the reason why its transfer cannot start, if any.

    If the input file is damaged, no file is transferred, because missing files would go unnoticed.
    """
    reader = Reader(abilities, call, destination)
    if call.single:
        source, target = call.single
        url, file_name = (target, source) if call.upload else (source, target)
        return [reader.item(ClassAd({"Url": url, "LocalFileName": file_name}), 0)]
    items: list[Item] = []
    problem = ""
    try:
        for item in reader.items(parse_ads(decode(_content(call.infile)))):
            items.append(item)  # one by one, to keep those before a damaged ad
    except OSError as error:
        problem = f"cannot read the input file: {error.strerror}"
    except ClassAdSyntaxError as error:
        problem = f"the input file is broken ({error}); was the disk of the execute point full?"
    if not items and not problem:
        problem = "the input file names no file"
    return _all_refused(items, problem) if problem else items


def _content(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read()


def _all_refused(items: list[Item], problem: str) -> list[Item]:
    failure = TransferFailure(ErrorClass.BAD_REQUEST, problem)
    whole = [Item(item.request, item.file_name, item.method, item.shown_url, failure) for item in items]
    return [*whole, refused_item(problem, len(items))]


def refused_item(problem: str, index: int = 0) -> Item:
    """Make an item for a request that could not be parsed."""
    return Item(Request("", "", index), "", "none", "", TransferFailure(ErrorClass.BAD_REQUEST, problem))
