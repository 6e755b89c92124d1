"""The picture of perf/ablation.py: throughput, TTFT and TPOT of every row, side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot(table: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the bars of `table` to `path`; a thin line goes from the median of a latency to its 99th percentile.

    Raises ModuleNotFoundError without the extra `perf`.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "ablation", "font.size": 9}
    from matplotlib import pyplot

    groups = list(dict.fromkeys(row["workload"] for row in table))
    # A gap between groups; the first row is at the top.
    places = [-(i + groups.index(row["workload"])) for i, row in enumerate(table)]
    colors = [f"C{groups.index(row['workload'])}" for row in table]
    figure, axes = pyplot.subplots(1, 3, sharey=True, figsize=(11, 0.3 * -places[-1] + 1.5), layout="constrained")
    axes[0].barh(places, [row["tok/s"] for row in table], color=colors)
    axes[0].set_xlabel("output tokens per second")
    for axis, name in zip(axes[1:], ("TTFT", "TPOT"), strict=True):
        medians, tails = ([row[f"{name} p{p}"] for row in table] for p in (50, 99))
        axis.barh(places, medians, color=colors)
        axis.hlines(places, medians, tails, color="black", linewidth=1)
        axis.set_xscale("log")
        axis.set_xlabel(f"{name}, ms: p50, line to p99")
    axes[0].set_yticks(places, [f"{row['workload']}: {row['configuration']}" for row in table])
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
