"""docs/reproduction.md: every experiment with what the paper has, what came out here, and what follows.

The page is made from experiments and results files alone: the same files give the same text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fedqueue.errors import ConfigError, StorageError
from fedqueue.report.style import save_png, styled
from fedqueue_reproduction import theorem_page
from fedqueue_reproduction.deployment import deployment_tables
from fedqueue_reproduction.figures import pictures
from fedqueue_reproduction.findings import Findings, read_findings
from fedqueue_reproduction.paired import paired_tables
from fedqueue_reproduction.summary import summary
from fedqueue_reproduction.tables import agreement, claim_table, figure_tables, lemma_table, winner_table
from fedqueue_reproduction.theorem_page import TheoremFindings, read_theorem
from fedqueue_reproduction.theorem_plot import theorem_plot
from fedqueue_reproduction.wording import count, listed

FILE: Final = "reproduction.md"
IMAGES: Final = Path("images") / "reproduction"

HEAD: Final = """\
# The paper, reproduced

"FedQueue: Queue-Aware Federated Learning for Cross-Facility HPC Training" (ICML 2026) has a section of controlled
experiments: simulated queues, MNIST, CIFAR-100, five methods. This page runs them again with this program and puts
claim and measurement side by side. What cannot be repeated here is its deployment: a language model of 7 billion
parameters, fine-tuned on four supercomputers. [chemistry](#chemistry) has it in miniature, in virtual time.
`fedqueue reproduce --page` writes this from [the experiments]({experiments}) and [their results]({results}); nothing
on it is written by hand.

## In short
"""

READING: Final = """\
## How to read it

- **Settings.** The paper leaves some things open, and its times fit more rounds than full MNIST needs. So experiments
  are run under several settings. `data=full` is all of MNIST, `data=scarce` 3,000 samples of it. `rho=log` reads the
  paper's rho as the standard deviation of the logarithm of the wait, `rho=seconds` as that of the wait itself.
- **Seeds.** Every seed gives all rows the same queues, data and first model. Differences are taken seed by seed.
- **Verdicts.** A claim *holds* in a setting if the 95 % interval of the paired difference lies on the side of the
  claim, and *does not hold* if it lies on the other. If the interval includes zero, *no difference* was *seen*, and
  the interval says how large one could be. A published value *agrees* if it lies in our 95 % interval, widened by the
  published spread. Nothing is corrected for the number of claims: about one in 40 differences that do not exist seems
  to be there in the claimed direction.
- **Targets that were not reached.** A run that never reached a target has no time to it; all that is known is that it
  would have been after the end of the run. Then no mean is taken. The rows are compared by the number of seeds in
  which each was first, with the exact sign test at 5 %.
- **Figures.** Their definitions are in [protocol.md](protocol.md#the-figures). The movement ratio is the number of
  model transfers until the target over that of FedQueue with the same seed.
"""


def write(experiments_dir: Path, results_dir: Path, docs_dir: Path) -> list[Path]:
    """Make the page and its figures; returns what was written, the page first. Needs matplotlib."""
    everything = read_findings(experiments_dir, results_dir)
    if not everything:
        raise ConfigError(f"{experiments_dir}: holds no experiment; name the folder that does")
    page = docs_dir / FILE
    theorem = read_theorem(results_dir)
    text = render(everything, _links(experiments_dir, results_dir, docs_dir), theorem)
    try:
        docs_dir.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{page}: cannot be written: {error.strerror}; make room, then try again") from None
    written = [page]
    for found in everything:
        for picture in pictures(found):
            with styled():
                written.append(save_png(picture.make(), docs_dir / IMAGES / picture.file))
    if theorem is not None:
        written.append(theorem_plot(theorem.everything, docs_dir / IMAGES / theorem_page.PICTURE))
    return written


def render(everything: Sequence[Findings], links: Mapping[str, str], theorem: TheoremFindings | None = None) -> str:
    """The text of the page; `links` leads to the folders of "experiments" and "results"."""
    by_name = {found.name: found for found in everything}
    parts = [HEAD.format(**links), summary(everything), READING]
    parts += [_section(found, by_name, links) for found in everything]
    if theorem is not None:
        runs = [run for one in theorem.everything for run in one.runs]
        made = _made_by(len(runs), sorted({run.seed for run in runs}), [theorem.made])
        parts.append(theorem_page.section(theorem, made, links, IMAGES / theorem_page.PICTURE))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _links(experiments_dir: Path, results_dir: Path, docs_dir: Path) -> dict[str, str]:
    folders = {"experiments": experiments_dir, "results": results_dir}
    return {name: Path(os.path.relpath(folder, docs_dir)).as_posix() for name, folder in folders.items()}


def _section(found: Findings, by_name: Mapping[str, Findings], links: Mapping[str, str]) -> str:
    experiment = found.experiment
    paper = experiment.paper
    if paper:  # most name a table or figure of the paper; some experiments are in none
        paper = (
            f"{paper[0].upper()}{paper[1:]}. " if paper.startswith("not in the paper") else f"In the paper: {paper}. "
        )
    about = " ".join(experiment.about.split())
    parts = [f"## {found.name}", f"**{experiment.title}.** {paper}{about}".strip()]
    command = f"`fedqueue reproduce {found.name}`"
    file = f"[{experiment.path.name}]({links['experiments']}/{experiment.path.name})"
    if found.results is None:
        parts.append(f"Not run yet: {command} ({file}).")
        if experiment.claims:
            parts.append("\n".join(f"- {claim.text}. Paper: {claim.paper}." for claim in experiment.claims))
        return "\n\n".join(parts)
    kept = f"[results]({links['results']}/{found.name}.json)"
    parts.append(f"{command} ({file}, {kept}): {_made(found)}")
    user = _first_user(found.name, by_name)
    if not experiment.grids:
        parts += [figure_tables(found), deployment_tables(found), paired_tables(found), agreement(found)]
    elif user:
        parts.append(f"The winners are under [{user}](#{user}).")
    else:
        parts.append(winner_table(found))
    for name in dict.fromkeys((row.tuned or "").partition("/")[0] for row in experiment.rows):
        if name in by_name:
            shown = _first_user(name, by_name)
            elsewhere = f"The winners of [{name}](#{name}) are under [{shown}](#{shown})."
            table = winner_table(by_name[name]) or f"The winners of [{name}](#{name}) are not known yet."
            parts.append(table if shown == found.name else elsewhere)
    if experiment.claims:
        parts.append(claim_table(found))
    parts.append(lemma_table(found))
    for picture in pictures(found):
        parts.append(f"![{picture.caption}]({(IMAGES / picture.file).as_posix()})\n\n*{picture.caption}*")
    return "\n\n".join(part for part in parts if part)


def _first_user(name: str, by_name: Mapping[str, Findings]) -> str | None:
    """The first experiment with rows that were tuned by this one."""
    tuned_by = {
        other.name: {(row.tuned or "").partition("/")[0] for row in other.experiment.rows} for other in by_name.values()
    }
    return next((other for other, names in tuned_by.items() if name in names), None)


def _made(found: Findings) -> str:
    """How many runs there are, with which seeds, on what, when."""
    assert found.results is not None
    there = len(found.results.runs)
    wanted = len(found.experiment.cells()) * found.experiment.seeds.count
    partly = f" of {wanted:,}, the rest not run yet" if there < wanted else ""
    return _made_by(there, found.seeds, found.results.made, partly)


def _made_by(runs: int, seeds: Sequence[int], made: Sequence[Mapping[str, Any]], partly: str = "") -> str:
    which = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    machines = list(dict.fromkeys(_machine(one["machine"]) for one in made))
    dates = sorted({one["date"] for one in made})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{count(runs, 'run')}{partly}, {count(len(seeds), 'seed')} ({which}), {when}, on {listed(machines)}."


def _machine(machine: Mapping[str, Any]) -> str:
    """The GPU if one did the work, else the processor; then the versions that matter."""
    device = machine.get("gpu") or f"{machine['processor']}, {count(machine['cores'], 'core')}"
    versions = [f"{name} {machine[name]}" for name in ("fedqueue", "torch", "numpy") if machine.get(name)]
    return f"{device} ({', '.join(versions)})"
