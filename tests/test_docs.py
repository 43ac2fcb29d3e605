"""The documentation is true: its example runs, its keys and defaults are the code's, its links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import json
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import fedqueue
from fedqueue.agent.privacy import PrivacySettings
from fedqueue.agent.settings import AgentSettings, OfferSettings
from fedqueue.cli import main
from fedqueue.config import Config, QueueSettings, load
from fedqueue.protocol.messages import ModelReady, Record
from fedqueue.protocol.predict import PREDICTORS
from fedqueue.protocol.shares import ShareSettings
from fedqueue.protocol.strategies import STRATEGIES
from fedqueue.training.causal_settings import CausalSettings, FieldSettings, LoraSettings
from tests.conftest import STRATEGY_NAMES, commands_of, trace_of
from tests.test_failures import FAULTS
from tests.test_strategies import check_invariants

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fedqueue"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
STRATEGY_PAGE = ROOT / "docs" / "writing-a-strategy.md"
OPTIONAL = {
    *("torch", "sklearn", "matplotlib", "safetensors", "transformers", "lightning", "pytorch_lightning", "peft"),
    *("uvicorn", "starlette", "cryptography", "dp_accounting"),
}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, indented ones too."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return ["\n".join(line.removeprefix(indent) for line in text.split("\n")) for indent, text in found]


def named_block(page: Path, language: str, name: str) -> str:
    """The block whose first line says which file it is."""
    (found,) = (text for text in blocks(page, language) if text.startswith(f"# {name}\n"))
    return found


@pytest.fixture
def example(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the strategy and the config of the page; what they register is forgotten afterwards."""
    (in_tmp / "half.py").write_text(named_block(STRATEGY_PAGE, "python", "half.py"))
    (in_tmp / "half.toml").write_text(named_block(STRATEGY_PAGE, "toml", "half.toml"))
    monkeypatch.setattr(sys, "path", sys.path[:])
    known = dict(STRATEGIES)
    yield in_tmp / "half.toml"
    STRATEGIES.clear()
    STRATEGIES.update(known)
    sys.modules.pop("half", None)


# The example of writing-a-strategy.md -------------------------------------------------------------------


def test_example_strategy_runs_from_the_command_line_and_replays(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(example), "--json", "--no-plots", "--out", "run"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["strategy"] == "half"
    assert summary["rounds"] == 20
    assert summary["max_staleness"] >= 1, "who was out when a round closed is used later"
    assert main(["replay", "run"]) == 0
    assert "every command the same" in capsys.readouterr().out


def test_example_strategy_closes_a_round_when_half_are_back(example: Path) -> None:
    trace = trace_of(load(example))
    check_invariants(trace)
    used = [(r.facts["version"], str(r.facts["job"])) for r in commands_of(trace, Record) if r.facts.get("version")]
    made = max(version for version, _ in used if isinstance(version, int))
    for number in range(1, made + 1):
        facilities = {job.partition("/")[0] for version, job in used if version == number}
        assert len(facilities) == 2, "half of four"


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_example_strategy_survives_every_fault(example: Path, faults: list[dict[str, Any]]) -> None:
    text = example.read_text()
    for fault in faults:
        lines = (f"{key} = {json.dumps(value)}" for key, value in fault.items())
        text += "\n[[fault]]\n" + "\n".join(lines) + "\n"
    example.write_text(text)
    for seed in range(1, 6):
        trace = trace_of(load(example, [f"run.seed={seed}", "run.seconds=2000.0", "simulator.aggregate_seconds=1.5"]))
        check_invariants(trace)
        if "probability" in faults[0] and (faults[0]["probability"] < 1 or faults[0].get("facility") == "east"):
            assert max(e.version for e, _ in trace if isinstance(e, ModelReady)) == 20, "others go on"


# configuration.md ---------------------------------------------------------------------------------------


def sections() -> dict[str, type]:
    """Every heading that configuration.md needs, with the dataclass behind it."""
    found: dict[str, type] = {}
    for name, hint in get_type_hints(Config).items():
        if name == "folder":  # set by whoever reads the file
            continue
        if name == "strategy":
            found |= {f"[strategy.{s}]": STRATEGIES[s].Options for s in STRATEGY_NAMES}
        elif get_origin(hint) is list:
            found[f"[[{name}]]"] = get_args(hint)[0]
        else:
            found[f"[{name}]"] = hint
    language = {"": CausalSettings, ".fields": FieldSettings, ".lora": LoraSettings}
    found |= {f"[task.options{part}]": kind for part, kind in language.items()}
    found |= {"[agent]": AgentSettings, "[offer.NAME]": OfferSettings, "[[share]]": ShareSettings}
    found["[privacy]"] = PrivacySettings
    for kind in get_args(QueueSettings):
        found[f'queue.kind = "{get_args(get_type_hints(kind)["kind"])[0]}"'] = kind
    return found


def tables() -> dict[str, dict[str, list[str]]]:
    """Heading -> key -> the cells of its row."""
    found: dict[str, dict[str, list[str]]] = {}
    heading = ""
    for line in (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"#+ `(.+)`", line):
            heading = match[1]
        elif line.startswith("#"):
            heading = ""
        elif heading and (match := re.match(r"\| `(\w+)` \|", line)):
            keys = found.setdefault(heading, {})
            assert match[1] not in keys, f"{heading} has {match[1]} twice"
            keys[match[1]] = [cell.strip() for cell in line.strip().strip("|").split("|")]
    return found


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def test_configuration_page_has_every_section() -> None:
    assert set(tables()) == set(sections())


@pytest.mark.parametrize("heading", sections())
def test_configuration_page_has_every_key_with_its_default(heading: str) -> None:
    rows, kind = tables()[heading], sections()[heading]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    assert set(rows) == set(fields), f"keys of {heading}"
    for name, field in fields.items():
        assert len(rows[name]) == 5, f"{heading} {name}: key, default, unit, allowed, meaning"
        said, default = rows[name][1], default_of(field)
        if default is dataclasses.MISSING:
            assert said == "required", f"{heading} {name}"
        elif default is None:
            assert said == "none", f"{heading} {name}"
        else:
            value = tomllib.loads(f"value = {said.strip('`')}")["value"]
            assert (value, type(value)) == (default, type(default)), f"{heading} {name}"


@pytest.mark.parametrize("heading", sections())
def test_configuration_page_names_every_choice(heading: str) -> None:
    rows, kind = tables()[heading], sections()[heading]
    for name, hint in get_type_hints(kind).items():
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        if name == "predictor":
            choices = tuple(PREDICTORS)
        if choices:
            assert set(re.findall(r"`([^`]+)`", rows[name][3])) == set(choices), f"{heading} {name}"


# All pages ----------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_to_something(page: Path) -> None:
    prose = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):  # elsewhere
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_every_toml_block_parses_and_complete_ones_are_configs(example: Path) -> None:
    complete = 0
    for page in PAGES:
        for text in blocks(page, "toml"):
            tree = tomllib.loads(text)
            if "run" in tree and "facility" in tree:
                example.write_text(text)
                load(example)
                complete += 1
    assert complete >= 2


def test_every_line_of_a_trace_is_in_a_golden_one() -> None:
    golden = {line for path in (ROOT / "tests" / "golden").glob("*.txt") for line in path.read_text().splitlines()}
    shown = [
        line
        for page in PAGES
        for text in blocks(page, "text")
        for line in text.splitlines()
        if re.match(r" +(\d+\.\d\d  [A-Z]|-> )", line)
    ]
    assert shown
    for line in shown:
        assert line in golden, f"no golden trace has: {line}"


def test_every_source_file_named_in_the_pages_exists() -> None:
    roots = (ROOT, SOURCE, SOURCE / "protocol")  # pages say coordinator/store.py, and strategies/base.py
    named = r"`((?:src|tests|experiments|docs|benchmarks)/[\w./-]+|[\w./-]+/\w+\.py)`"
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(named, page.read_text("utf-8")):
            assert any((root / name).exists() for root in roots), f"{page.name}: {name}"


def test_the_source_tree_names_what_is_there() -> None:
    (tree,) = (text for text in blocks(ROOT / "docs" / "architecture.md", "text") if text.startswith("src/fedqueue/"))
    folders: list[tuple[int, Path]] = [(-1, ROOT)]
    named = set()
    for line in tree.splitlines():
        begun = re.match(r" *(?=\S)", line)
        depth = len(begun[0]) if begun else 0
        while folders[-1][0] >= depth:
            folders.pop()
        if found := re.match(r" *([\w/]+/)(?=\s|$)", line):
            folders.append((depth, folders[-1][1] / found[1]))
        for name in re.findall(r"[\w/]+\.py\b", line):
            assert (folders[-1][1] / name).is_file(), f"{folders[-1][1].relative_to(ROOT)} has no {name}"
            named.add(folders[-1][1] / name)
    for room in ("protocol", "coordinator", "agent", "worker"):
        there = {path for path in (SOURCE / room).glob("*.py") if path.name != "__init__.py"}
        assert there <= named, f"the tree lacks {sorted(path.name for path in there - named)}"


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 800


# Docstrings ---------------------------------------------------------------------------------------------


def test_examples_in_docstrings_are_true() -> None:
    attempted = 0
    for found in pkgutil.walk_packages(fedqueue.__path__, "fedqueue."):
        if found.name.endswith("__main__"):  # runs the command line
            continue
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if error.name in OPTIONAL:
                continue
            raise
        failed, tried = doctest.testmod(module)
        assert not failed, f"{found.name}: see the output above"
        attempted += tried
    assert attempted > 20


def test_the_walk_of_a_real_round_names_functions_that_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    walk = page.partition("## A real round, file by file")[2].partition("\n## ")[0]
    steps = re.split(r"\*\*`([\w/]+\.py)`\*\*", walk)[1:]
    assert len(steps) > 30
    for name, said in zip(steps[::2], steps[1::2], strict=True):
        defined = set()
        for part in ast.walk(ast.parse((ROOT / "src" / "fedqueue" / name).read_text())):
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                defined.add(part.name)
            elif isinstance(part, ast.ClassDef):
                defined |= {f"{part.name}.{inner.name}" for inner in part.body if hasattr(inner, "name")}
        called = re.findall(r"`((?:[A-Z]\w+\.)?_?[a-z]\w*)`", said)
        ours = [call for call in called if call not in ("sbatch", "qsub", "jit")]
        assert ours, f"{name}: what is called there?"
        missing = [call for call in ours if call not in defined]
        assert not missing, f"{name} has no {missing}"
