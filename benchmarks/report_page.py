"""Renders docs/benchmarks.json as the benchmark page and as the table of the README."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["DATA", "PAGE", "page", "readme_table", "stale", "write"]

DATA, PAGE, PLOTS, README = "docs/benchmarks.json", "docs/benchmarks.md", "docs/images", "README.md"
BEGIN, END = "<!-- benchmarks: written by python -m benchmarks.report -->", "<!-- benchmarks: end -->"
SITE = "docs/benchmarks.md"
Sections = dict[str, dict[str, Any]]

HEAD = """# Benchmarks

`make bench-report` measured these figures and wrote this page. Each comparison runs both sides in the same run, taking turns, on one
machine. A figure is the median over the runs, with the minimum and maximum in parentheses. `docs/benchmarks.json` has the
raw result of every run.
"""


class Spread:
    """Values of several runs: their median, minimum and maximum."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values = sorted(values)
        self.median = statistics.median(self.values)

    def text(self, digits: int = 2, unit: str = "") -> str:
        """As "0.96 (0.93-1.02)"; one value without a spread."""
        shown = [f"{value:,.{digits}f}" for value in (self.median, self.values[0], self.values[-1])]
        return f"{shown[0]}{unit}" + (f" ({shown[1]}-{shown[2]})" if len(self.values) > 1 else "")

    def error(self) -> tuple[float, float]:
        """Distances from the median to the least and the largest value, for error bars."""
        return self.median - self.values[0], self.values[-1] - self.median


def over(runs: list[Any], value: Callable[[Any], float | None]) -> Spread | None:
    """The spread of a figure over the runs; None if no run has it."""
    found = [number for run in runs if (number := value(run)) is not None]
    return Spread(found) if found else None


def cell(spread: Spread | None, digits: int = 2, unit: str = "") -> str:
    """The text of a table cell; "-" if it was not measured."""
    return "-" if spread is None else spread.text(digits, unit)


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# ------------------------------------------------------------------------------------------------------ figures


def lookup_ratio(runs: list[Any], batch: int, name: str) -> Spread | None:
    """Time of a lookup over that of the bare operator."""

    def value(run: Any) -> float | None:
        (times,) = (row["us"] for row in run if row["batch"] == batch)
        return times[name] / times["bare op"] if name in times else None

    return over(runs, value)


def serving_line(run: Any, call: str, batch: int, callers: int) -> dict[str, Any]:
    """One line of a run."""
    (line,) = (r for r in run if (r["call"], r["batch"], r["concurrency"]) == (call, batch, callers))
    return line


def rate_ratio(runs: list[Any], of: str, beside: str, *which: Any) -> Spread | None:
    """Requests per second of one server divided by another's."""

    def value(run: Any) -> float | None:
        line = serving_line(run, *which)
        return line[of]["rps"] / line[beside]["rps"] if of in line and beside in line else None

    return over(runs, value)


def training_ratio(runs: list[Any], kind: str, variant: str = "") -> Spread | None:
    """Samples per second divided by TorchRec's: the better variant of each, or one variant of both."""

    def value(run: Any) -> float | None:
        rates = {name: statistics.median(v) for name, v in run[kind].items() if isinstance(v, list)}
        sides = []
        for side in ("recinfer", "torchrec"):
            names = [f"{side}{variant}"] if variant else [side, f"{side} pipelined"]
            if not any(name in rates for name in names):
                return None
            sides.append(max(rates[name] for name in names if name in rates))
        return sides[0] / sides[1]

    return over(runs, value)


def planner_figure(runs: list[Any], case: str, figure: str) -> Spread | None:
    """Seconds or gap of a plan."""
    return over(runs, lambda run: run[case].get(figure) if case in run else None)


def added_ms(runs: list[Any], call: str, more: str, less: str) -> Spread | None:
    """The added latency of the median call."""
    return over(runs, lambda run: run["p50_ms"][call][more] - run["p50_ms"][call][less])


def context_figure(runs: list[Any], candidates: int, figure: str) -> Spread | None:
    """A figure of the requests with so many candidates."""
    return over(runs, lambda run: next(row[figure] for row in run if row["candidates"] == candidates))


def remap_ns(runs: list[Any], queries: str, method: str) -> Spread | None:
    """Nanoseconds of CPU time per id."""
    return over(runs, lambda run: run["ns"][queries].get(method))


def remap_ratio(runs: list[Any], queries: str, method: str) -> Spread | None:
    """A method's time divided by recinfer's."""

    def value(run: Any) -> float | None:
        times = run["ns"][queries]
        return times[method] / times["recinfer"] if method in times else None

    return over(runs, value)


# --------------------------------------------------------------------------------------------------- the sections

LOOKUPS = ("unsharded", "table-wise", "row-wise", "column-wise")
PEERS = (
    "torchrec table-wise scripted",
    "torchrec table-wise eager",
    "torchrec row-wise scripted",
    "torchrec row-wise eager",
)


def lookup_section(runs: list[Any]) -> str:
    batches = [row["batch"] for row in runs[0]]
    names = [name for name in (*LOOKUPS, *PEERS) if name in runs[0][0]["us"]]
    rows = [
        [
            name if "torchrec" not in name else name.replace("torchrec", "TorchRec"),
            *(cell(lookup_ratio(runs, b, name)) for b in batches),
        ]
        for name in names
    ]
    said = "Time of one lookup divided by the time of the bare FBGEMM operator, called with offsets (1 is as fast; lower is better). 26 tables "
    said += "in the shape of Criteo's, INT8, 64 columns, one id per bag, one thread; sharded tables are on 2 ranks of one host.\n\n"
    return said + table(["", *(f"batch {b}" for b in batches)], rows)


def serving_section(runs: list[Any]) -> str:
    rows = []
    for line in runs[0]:
        which = line["call"], line["batch"], line["concurrency"]
        p99 = over(runs, lambda run, which=which: serving_line(run, *which)["ours"]["p99_us"] / 1e3)
        rate = over(runs, lambda run, which=which: serving_line(run, *which)["ours"]["rps"])
        rows.append(
            [
                f"{line['call']} of {line['batch']}",
                str(line["concurrency"]),
                cell(rate, 0),
                cell(p99),
                cell(rate_ratio(runs, "ours", "echo", *which)),
                cell(rate_ratio(runs, "ours", "torchserve", *which)),
            ]
        )
    said = "Requests per second of one server process, and their ratio to a bare gRPC echo server that sends as many bytes and to TorchServe "
    said += "with the same archive and one worker (higher is better). A DLRM of 26 INT8 features; clients on the same machine.\n\n"
    head = ["call", "callers", "requests per second", "p99, ms", "rate / echo's", "rate / TorchServe's"]
    return said + table(head, rows)


def planner_section(runs: list[Any]) -> str:
    rows = []
    for case in runs[0]:
        if case.endswith(" torchrec"):
            continue
        peer = f"{case} torchrec"
        rows.append(
            [
                case.replace(" x ", " tables, ").replace(" train", " ranks"),
                cell(planner_figure(runs, case, "seconds"), unit=" s"),
                cell(planner_figure(runs, peer, "seconds"), 1, " s"),
                cell(planner_figure(runs, case, "gap"), 3),
                cell(planner_figure(runs, peer, "gap"), 3),
            ]
        )
    said = "Plans for training. The gap is the time of the busiest rank divided by a lower bound; 1 is proven optimal. Both plans are "
    said += "rated with the same estimates.\n\n"
    return said + table(["", "recinfer, time", "TorchRec, time", "recinfer, gap", "TorchRec, gap"], rows)


def training_section(runs: list[Any]) -> str:
    def rate(kind: str, name: str) -> str:
        return cell(
            over(runs, lambda run: statistics.median(v) if isinstance(v := run[kind].get(name), list) else None), 0
        )

    names = ("recinfer", "recinfer pipelined", "torchrec", "torchrec pipelined")
    rows = [
        [
            kind.replace("_", "-"),
            *(rate(kind, name) for name in names),
            cell(training_ratio(runs, kind)),
            cell(training_ratio(runs, kind, " pipelined")),
        ]
        for kind in runs[0]
    ]
    said = "Samples per second of one training program on 2 gloo processes of one host (higher is better): 8 tables of 100,000 x 64, "
    said += "pooling 5, batch 512 per rank. Ratios above 1 mean that recinfer is faster. TorchRec updates rows with FBGEMM's kernel, which is "
    said += "slow on this processor ([record 0029](decisions/0029-row-wise-adagrad-on-cpu-has-a-compiled-kernel.md)); expect smaller ratios "
    said += "on a processor without that penalty.\n\n"
    head = [
        "sharding",
        "recinfer",
        "recinfer, pipelined",
        "TorchRec",
        "TorchRec, pipelined",
        "better / better",
        "pipelined / pipelined",
    ]
    return said + table(head, rows)


def scaleout_section(runs: list[Any]) -> str:
    rows = [
        [
            call,
            cell(over(runs, lambda run, call=call: run["p50_ms"][call]["single"])),
            cell(added_ms(runs, call, "two shards", "single")),
            cell(added_ms(runs, call, "bare fan-out", "bare")),
        ]
        for call in runs[0]["p50_ms"]
    ]
    said = "Median latency of one caller in ms, in one process, and what a ranker with two shard servers adds on loopback. The last column is "
    said += "what a bare gRPC server adds that calls two others with as many bytes.\n\n"
    return said + table(["call", "one process, ms", "two shard servers add, ms", "bare gRPC adds, ms"], rows)


def context_section(runs: list[Any]) -> str:
    figures = ("context_ms", "over_least", "repeated_ms", "repeated_over_context")
    counts = [row["candidates"] for row in runs[0]]
    rows = [[f"{count:,}", *(cell(context_figure(runs, count, figure)) for figure in figures)] for count in counts]
    said = "A prediction for one user and several candidates, in one process with one thread. The model has a transformer of two layers over "
    said += "12 items, width 16, as its user tower, and was exported with `--user`. With the user in the request's context the tower runs once; "
    said += "with the user repeated it runs for each candidate. A time is the least over the turns of a run, in which all cells take turns; "
    said += f"the ratios are of these times, to {counts[0]} candidate (lower is better) and to the context (higher is better).\n\n"
    head = ["candidates", "context, ms", f"over {counts[0]} candidate", "user repeated, ms", "repeated / context"]
    return said + table(head, rows)


def vocabulary_section(runs: list[Any]) -> str:
    methods = list(runs[0]["ns"]["known, uniform"])
    others = [method for method in methods if method != "recinfer"]
    rows = [
        [
            queries,
            *(cell(remap_ns(runs, queries, method), 0) for method in methods),
            *(cell(remap_ratio(runs, queries, method), 1) for method in others),
        ]
        for queries in runs[0]["ns"]
    ]
    served = over(runs, lambda run: max(run["served"].values()))
    said = f"Time to find the rows of raw ids in a vocabulary of {runs[0]['ids']:,} ids, in ns per id, and the other methods' times divided by "
    said += "recinfer's (higher is better). One thread; a method answers 50,000 ids at once, and a figure is the fastest round's. The index has "
    said += f"{cell(over(runs, lambda run: run['bytes_per_id']), 1)} bytes per id and opens in {cell(over(runs, lambda run: run['open_s']))} s. A "
    said += "served lookup of 26 features takes at most "
    said += f"{cell(served)} times as long as without vocabularies (batches of 1, 32 and 256).\n\n"
    return said + table(["ids", *(f"{m}, ns" for m in methods), *(f"{m} / recinfer" for m in others)], rows)


TITLES: dict[str, tuple[str, Callable[[list[Any]], str]]] = {
    "lookup": ("Quantized lookup", lookup_section),
    "serving": ("Serving", serving_section),
    "planner": ("Planner", planner_section),
    "training": ("Training", training_section),
    "scaleout": ("Scale-out", scaleout_section),
    "context": ("One user, many candidates", context_section),
    "vocabulary": ("Raw ids", vocabulary_section),
}


def _count(runs: list[Any]) -> str:
    return f"{len(runs)} run{'s' if len(runs) != 1 else ''}"


def page(sections: Sections) -> str:
    """docs/benchmarks.md."""
    parts = [HEAD]
    for name, section in sections.items():
        title, body = TITLES[name]
        parts.append(f"## {title}\n\n{body(section['runs'])}\n![{title}](images/bench-{name}.svg)\n")
        host, found = section["machine"], section["versions"]
        parts.append(
            f"{section['date']}, commit {section['commit']}, {_count(section['runs'])}, {host['processor']}, {host['cores']} cores, "
            f"{host['memory_gib']} GiB, load before the run {section['load_before']}; "
            + ", ".join(f"{package} {version}" for package, version in found.items())
            + ".\n"
        )
        if section["quick"]:
            parts.append("**Measured with `--quick`, to try the program: these figures mean nothing.**\n")
        parts.append("```text\n" + "\n".join(section["commands"]) + "\n```\n")
    return "\n".join(parts)


def readme_rows(sections: Sections) -> Iterator[list[str]]:
    """The rows of the README's table that were measured."""
    runs = {name: section["runs"] for name, section in sections.items()}
    if "lookup" in runs:
        own = ", ".join(
            f"{kind} {cell(lookup_ratio(runs['lookup'], 256, kind))}" for kind in ("table-wise", "row-wise")
        )
        peer = ", ".join(
            f"{kind} {cell(lookup_ratio(runs['lookup'], 256, f'torchrec {kind} scripted'))}"
            for kind in ("table-wise", "row-wise")
        )
        yield [
            "Time of a lookup of 256 samples, divided by the bare FBGEMM operator's (lower is better)",
            own,
            f"TorchRec, scripted: {peer}",
        ]
    if "serving" in runs:
        for batch in (1, 256):
            ratio = rate_ratio(runs["serving"], "ours", "torchserve", "Predict", batch, 1)
            echo = rate_ratio(runs["serving"], "ours", "echo", "Predict", batch, 1)
            samples = "1 sample" if batch == 1 else f"{batch} samples"
            said = f"Predict requests per second ({samples}, one caller), divided by TorchServe's (higher is better)"
            yield [said, cell(ratio, 1), f"TorchServe: 1; divided by a bare gRPC echo's: {cell(echo)}"]
    if "planner" in runs:
        case = [case for case in runs["planner"][0] if not case.endswith(" torchrec")][-1]
        tables, _, ranks = case.removesuffix(" train").partition(" x ")
        figures = [
            f"{cell(planner_figure(runs['planner'], name, 'seconds'), 1, ' s')}, gap {cell(planner_figure(runs['planner'], name, 'gap'))}"
            for name in (case, f"{case} torchrec")
        ]
        yield [
            f"Time to plan {tables} tables on {ranks} ranks, and gap of the plan (lower is better; 1 is optimal)",
            figures[0],
            f"TorchRec: {figures[1]}",
        ]
    if "training" in runs:
        kinds = ", ".join(
            f"{kind.replace('_', '-')} {cell(training_ratio(runs['training'], kind))}" for kind in runs["training"][0]
        )
        yield [
            "Training samples per second on 2 processes, divided by TorchRec's (higher is better)",
            kinds,
            "TorchRec: 1",
        ]
    if "scaleout" in runs:
        added = added_ms(runs["scaleout"], "Predict 256", "two shards", "single")
        bare = added_ms(runs["scaleout"], "Predict 256", "bare fan-out", "bare")
        yield [
            "Latency that two shard servers add to a Predict of 256 samples (lower is better)",
            cell(added, 2, " ms"),
            f"bare gRPC: {cell(bare, 2, ' ms')}",
        ]
    if "vocabulary" in runs:
        queries = runs["vocabulary"][0]["ns"]
        least = min(
            (
                found
                for name in queries
                if (found := remap_ratio(runs["vocabulary"], name, "TorchRec's steps")) is not None
            ),
            key=lambda spread: spread.median,
        )
        yield [
            "Time to find the row of a raw id among ten million, one thread (lower is better)",
            "known ids {}, half unknown {}".format(
                *(cell(remap_ns(runs["vocabulary"], name, "recinfer"), 0, " ns") for name in list(queries)[:2])
            ),
            f"the steps of TorchRec's module: at least {cell(least, 0)} times as long",
        ]


def readme_table(sections: Sections) -> str:
    """The text between the README's two markers."""
    body = table(["what", "recinfer", "compared with"], readme_rows(sections))
    quick = any(section["quick"] for section in sections.values())
    note = "\n**Some figures are of a `--quick` run, to try the program: they mean nothing.**\n" if quick else ""
    return f"{BEGIN}\n{body}{note}{END}"


def _with_table(text: str, sections: Sections) -> str:
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{README} lacks the markers {BEGIN!r} and {END!r}")
    return before + readme_table(sections) + after


def stale(root: Path) -> list[str]:
    """The files, of the page and the README, that differ from the data."""
    sections = json.loads((root / DATA).read_text())["sections"]
    readme = (root / README).read_text()
    found = [PAGE] if (root / PAGE).read_text() != page(sections) else []
    return found + ([README] if _with_table(readme, sections) != readme else [])


def write(root: Path) -> None:
    """Write the page, its plots and the README's table from the data."""
    from benchmarks.report_plots import PLOT_OF

    sections = json.loads((root / DATA).read_text())["sections"]
    (root / PLOTS).mkdir(parents=True, exist_ok=True)
    for name, section in sections.items():
        PLOT_OF[name](section["runs"], root / PLOTS / f"bench-{name}.svg")
    (root / PAGE).write_text(page(sections))
    readme = root / README
    if readme.exists():
        readme.write_text(_with_table(readme.read_text(), sections))
