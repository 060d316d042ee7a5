"""The page's history: sums of the records of files, days, percentiles, and the export."""

from __future__ import annotations

import asyncio
import csv
import gc
import io
import tracemalloc
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from stageout_web.export import COLUMNS, SECRET_COLUMNS, export, safe_cell
from stageout_web.records import DAYS, MOST_NAMES, OTHERS, FileRecord, Sums, percentile
from stageout_web.views.history import Range, history
from stageout_web.views.page import PageContext
from tests.unit.web_site import NOW, SECRET_NAME, SECRET_PATH, SECRET_WORDS, Site, file_record, job_name

TODAY = date.fromtimestamp(NOW).isoformat()
LONG_AGO = "2000-01-01"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A page with an empty history."""
    made = Site(tmp_path)
    yield made
    made.ring.close()


def read(site: Site) -> None:
    asyncio.run(site.records.read())


def rows_of(site: Site, sees_names: bool = False, first: str = LONG_AGO, most: int = 100) -> list[dict[str, str]]:
    async def text() -> str:
        found = export(site.records.path, first, TODAY, sees_names, most)
        return b"".join([part async for part in found]).decode()

    return list(csv.DictReader(io.StringIO(asyncio.run(text()))))


def test_sums_are_by_day_destination_owner_and_plugin(site: Site) -> None:
    yesterday = {"TransferEndTime": NOW - 86400, "StageOutAcceptedAt": NOW - 86400 - 10}
    site.history.append([
        file_record(1), file_record(2, Owner="bob", TransferUrl="s3://user:word@s3.example.org/x"),
        file_record(3, **yesterday), file_record(4, StageOutState="Failed"), file_record(5, StageOutState="Lost"),
    ])  # fmt: skip
    read(site)
    days = site.records.sums("day", LONG_AGO, TODAY)
    assert [(sums.files, sums.size_bytes, sums.undelivered) for sums in days.values()] == [(1, 1000, 0), (2, 2000, 2)]
    assert {name: sums.files for name, sums in site.records.sums("owner", TODAY, TODAY).items()} == {
        "alice@example.org": 1, "bob": 1,
    }  # fmt: skip
    assert set(site.records.sums("destination", LONG_AGO, TODAY)) == {"store.example.org", "s3.example.org"}
    assert site.records.sums("plugin", LONG_AGO, TODAY)["stageout_curl_plugin"].files == 3
    assert site.records.sums("day", LONG_AGO, LONG_AGO) == {}


def test_later_records_are_added_once(site: Site) -> None:
    for number in range(5):
        site.history.append([file_record(number)])
        read(site)
        read(site)
        assert site.records.delivered(TODAY) == (number + 1, 1000 * (number + 1))


def test_a_removed_file_leaves_no_double_sums(site: Site) -> None:
    site.history.append([file_record(number) for number in range(5)])
    read(site)
    site.records.path.write_bytes(site.records.path.read_bytes()[: site.records.path.stat().st_size // 2])
    read(site)
    assert site.records.sums("day", TODAY, TODAY)[TODAY].files == 2


def test_delivered_today_counts_whole_outputs_from_the_records(site: Site) -> None:
    site.ring.add_deliveries(TODAY, 77, 77)
    asyncio.run(site.tick())
    assert site.state.delivered == (77, 77), "without records the page counts what it saw"
    site.history.append([
        file_record(1), file_record(1, StageOutFileNumber=1), file_record(2),
        file_record(2, StageOutFileNumber=1, StageOutState="Failed"), file_record(3),
    ])  # fmt: skip
    asyncio.run(site.tick())
    assert site.state.delivered == (2, 4000)


def test_records_that_cannot_be_read_are_a_problem_of_the_view_only(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    site.ring.add_deliveries(TODAY, 77, 77)
    monkeypatch.setattr("stageout.core.history.durable.disk.open", refuse)
    asyncio.run(site.tick())
    assert "Permission denied" in site.records.problem
    assert site.state.delivered == (77, 77)
    assert not site.state.problems
    monkeypatch.undo()
    asyncio.run(site.tick())
    assert not site.records.problem


def test_the_view_tells_of_rotated_parts_that_cannot_be_read(site: Site) -> None:
    def shown() -> str:
        asyncio.run(site.tick())
        return str(history(PageContext(), site.records, {}))

    parts = [site.records.path.with_name(f"{site.records.path.name}.2026010{day}T000000") for day in (1, 2)]
    for part in parts:
        part.mkdir()
    text = shown()
    assert "2 rotated parts of the history cannot be read" in text
    assert "No delivery ended" not in text, "the page cannot know that"
    parts[0].rmdir()
    site.history.append([file_record(1)])
    text = shown()
    assert "1 rotated part of the history cannot be read" in text
    assert "2027-01-15" in text
    parts[1].rmdir()
    assert "cannot be read" not in shown()


def test_old_days_go_and_a_clock_that_is_ahead_makes_no_new_ones(site: Site) -> None:
    site.history.append([
        file_record(1, TransferEndTime=NOW - 20 * 86400), file_record(2, TransferEndTime=NOW + 20 * 86400),
        file_record(3, TransferEndTime=10**15, RecordWriteDate=10**15), file_record(4, RecordWriteDate="x"),
    ])  # fmt: skip
    read(site)
    assert list(site.records.sums("day", "0", "9")) == [TODAY]
    assert site.records.days()[-1] == TODAY
    assert len(site.records.days()) == DAYS
    site.clock.now_s += DAYS * 86400
    read(site)
    assert site.records.sums("day", "0", "9") == {}


def test_percentiles_are_exact_to_three_per_cent() -> None:
    sums = Sums()
    for took_s in range(1, 10_001):
        sums.add(FileRecord(TODAY, "d", "o", "p", 1, 1, True, took_s, took_s * 1000, ("", 0, "")))
    for share in (0.5, 0.95, 0.99):
        assert percentile(sums.took, share) == pytest.approx(share * 10_000, rel=0.03)
    assert percentile(sums.rates, 0.5) == pytest.approx(5e6, rel=0.03)
    assert percentile(sums.took, 0.001) == 10
    assert percentile({}, 0.5) is None


def test_memory_stays_bounded_with_many_owners(site: Site) -> None:
    gc.collect()
    tracemalloc.start()
    for day in range(DAYS):
        site.records._add(
            FileRecord((date.fromtimestamp(NOW) - timedelta(days=day)).isoformat(), f"s{number}", f"o{number}", "p", 1,
                       1, True, number * 97 % 90_000, number * 7919, (f"j{number}", 1, ""))
            for number in range(2000)
        )  # fmt: skip
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    owners = site.records.sums("owner", LONG_AGO, TODAY)
    assert len(owners) == MOST_NAMES + 1
    assert owners[OTHERS].files == DAYS * (2000 - MOST_NAMES)
    assert used < 15 << 20


@pytest.mark.parametrize(
    ("query", "first", "last"),
    [
        ({}, 0, -1), ({"first": "x", "last": "2027-99"}, 0, -1), ({"first": "1999-01-01", "last": "2999-01-01"}, 0, -1),
        ({"first": (date.fromtimestamp(NOW) - timedelta(days=1)).isoformat()}, -2, -1),
    ],
)  # fmt: skip
def test_a_range_of_days_stays_within_those_kept(site: Site, query: dict[str, str], first: int, last: int) -> None:
    days = site.records.days()
    assert Range.of(query, days) == ("day", days[first], days[last])


# ---- export ----------------------------------------------------------------------------------------------------------


def test_the_export_has_names_only_with_a_token(site: Site) -> None:
    site.history.append([file_record(1, TransferError=SECRET_WORDS, StageOutReason=SECRET_WORDS)])
    [row] = rows_of(site)
    assert list(row) == list(COLUMNS)
    assert not [word for word in (SECRET_NAME, SECRET_PATH, SECRET_WORDS) if word in " ".join(row.values())]
    assert (row["destination"], row["seconds"], row["node"]) == ("store.example.org", "60", "ep1.example.org")
    [row] = rows_of(site, sees_names=True)
    assert list(row) == [*COLUMNS, *SECRET_COLUMNS]
    assert row["name"] == SECRET_NAME
    assert SECRET_PATH in row["url"]


def test_the_export_has_the_days_wanted_newest_first_and_an_end(site: Site) -> None:
    for number in range(20):
        written = {"TransferEndTime": NOW - (19 - number) * 43200, "RecordWriteDate": NOW - (19 - number) * 43200}
        site.history.append([file_record(number, **written)])
    jobs = [row["job"].split("#")[1] for row in rows_of(site)]
    assert jobs == [f"{number}.0" for number in range(19, -1, -1)]
    assert len(rows_of(site, most=3)) == 3
    first = (date.fromtimestamp(NOW) - timedelta(days=1)).isoformat()
    assert 2 <= len(rows_of(site, first=first)) <= 4


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1"])
def test_no_cell_of_the_export_is_a_formula(site: Site, text: str) -> None:
    assert safe_cell(text) == f"'{text}"
    site.history.append([file_record(1, TransferFileName=text, Owner=text)])
    [row] = rows_of(site, sees_names=True)
    assert not [value for value in row.values() if value[:1] in tuple("=+-@\t\r\n\uff1d")]


def test_plain_cells_stay() -> None:
    for text in ("", "0", "a=b", "alice@example.org", "https://x/y", "2027-01-15T08:00:00Z"):
        assert safe_cell(text) == text


def test_quotes_and_commas_stay_in_their_cell(site: Site) -> None:
    hostile: dict[str, Any] = {"TransferFileName": 'a",=1,"b', "Owner": 'x\n"y"'}
    site.history.append([file_record(1, **hostile)])
    [row] = rows_of(site, sees_names=True)
    assert row["name"] == 'a",=1,"b'


def test_a_record_that_is_none_breaks_no_export(site: Site) -> None:
    odd: list[dict[str, Any]] = [{"StageOutAcceptedAt": "x"}, {"TransferEndTime": "x"}, {"RecordWriteDate": "x"}]
    site.history.append([file_record(number, **more) for number, more in enumerate(odd)])
    site.history.append([file_record(9)])
    assert [row["job"] for row in rows_of(site)] == [job_name(9)]
    read(site)
    assert site.records.delivered(TODAY) == (1, 1000)
