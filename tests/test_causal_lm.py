"""Language models learn answers: what is learnt, what is seen, what travels; with a small pretrained model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedqueue import data
from fedqueue.cli import main
from fedqueue.config import load, parse
from fedqueue.errors import ConfigError, DataError
from fedqueue.training.causal_settings import FieldSettings
from fedqueue.training.instructions import PLAIN_TEMPLATE, Conversation, read_conversations, tokenize, with_template
from fedqueue.training.job import TaskSettings
from tests.conftest import facility

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="needs fedqueue[lm]")
peft = pytest.importorskip("peft", reason="needs fedqueue[lm]")

STORIES = data.root() / "models" / "stories260K"

pytestmark = [
    pytest.mark.skipif(not STORIES.is_dir(), reason="models/stories260K is not in the data folder (FEDQUEUE_DATA)"),
    pytest.mark.filterwarnings("ignore"),  # of other people's libraries
    pytest.mark.waits(15),
]

ROWS = [
    {"instruction": f"How many legs have {count} {animal}?", "input": "", "output": f"{count * legs} legs"}
    for animal, legs in (("dogs", 4), ("birds", 2), ("ants", 6))
    for count in range(1, 5)
]


@pytest.fixture
def files(in_tmp: Path) -> Path:
    for name, rows in (("north", ROWS[:8]), ("south", ROWS[4:]), ("test", ROWS[::3])):
        write(in_tmp / f"{name}.jsonl", rows)
    return in_tmp


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(folder: Path, *, batch_size: int = 4, facilities: int = 2, **options: Any) -> Any:
    from fedqueue.training.tasks import make_task

    given: dict[str, Any] = {
        "model": str(STORIES),
        "train": {name: str(folder / f"{name}.jsonl") for name in ("north", "south")[:facilities]},
        "test": str(folder / "test.jsonl"),
        "sequence_length": 192,
        **options,
    }
    settings = TaskSettings(name="causal-lm", optimizer="adamw", batch_size=batch_size, options=given)
    return make_task(settings, facilities, seed=1)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# What is learnt -------------------------------------------------------------------------------------------


def test_the_answer_is_learnt_and_nothing_else() -> None:
    tokenizer = with_template(transformers.AutoTokenizer.from_pretrained(STORIES))
    assert tokenizer.chat_template == PLAIN_TEMPLATE

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    says = [("system", "Be brief."), ("user", "Who?"), ("assistant", "Tim."), ("user", "When?"), ("assistant", "Now.")]
    talk = Conversation([{"role": role, "content": text} for role, text in says], "here", None)
    pieces = [
        (tokens("<s>### System:\nBe brief.\n\n### User:\nWho?\n\n### Assistant:\n"), False),
        (tokens("Tim.</s>"), True),
        (tokens("\n\n### User:\nWhen?\n\n### Assistant:\n"), False),
        (tokens("Now.</s>"), True),
    ]
    made = tokenize(tokenizer, talk)
    assert made.tokens == [token for piece, _ in pieces for token in piece]
    assert made.is_answer == [learnt for piece, learnt in pieces for _ in piece]
    assert made.tokens[-1] == tokenizer.eos_token_id, "so it learns where to end"


def test_loss_is_that_of_the_answers_of_each_example_alone(files: Path) -> None:
    """Against a plain forward pass of each example by itself: nobody sees a neighbour, no prompt counts."""
    task = make(files)
    assert int(task._tests[""][0].examples.max()) > 1, "several in a sequence"
    model = transformers.AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    tokenizer = with_template(transformers.AutoTokenizer.from_pretrained(STORIES))
    total, count = 0.0, 0
    for record in read_conversations(files / "test.jsonl"):
        example = tokenize(tokenizer, record)
        tokens = torch.tensor([example.tokens])
        with torch.inference_mode():
            chances = model(tokens).logits.log_softmax(dim=-1)
        for place in (place for place, learnt in enumerate(example.is_answer) if learnt):
            total -= float(chances[0, place - 1, tokens[0, place]])
            count += 1
    found = task.score(task.initial_model())
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(2.718281828 ** (total / count), rel=1e-4)
    assert found["score"] == -found["loss"]


def test_steps_are_the_same_packed_or_not_in_pieces_or_not_kept_or_computed_again(files: Path) -> None:
    """All examples are in each step, so only rounding differs."""

    def one_step(**options: Any) -> Any:
        task = make(files, batch_size=8, facilities=1, **options)
        first = task.initial_model()
        trained = task.train(facility=0, model=first, steps=1, learning_rate=1e-4, key=1)
        assert trained.samples == 8
        assert distance(trained.model, first) > 5e-5
        return trained

    packed = one_step()
    for options in ({"packing": False}, {"packing": False, "sequences_at_once": 3}, {"checkpointing": True}):
        other = one_step(**options)
        assert other.loss == pytest.approx(packed.loss, rel=1e-5)
        # Adam makes steps of one size of gradients of any size: those near zero may turn.
        moved = [(packed.model[name] - other.model[name]).abs() for name in packed.model]
        assert sum(float((d > 1e-5).sum()) for d in moved) < 0.01 * sum(d.numel() for d in moved)
    assert one_step(precision="bfloat16").loss == pytest.approx(packed.loss, rel=0.02)


def test_a_model_that_cannot_tell_examples_apart_has_one_a_sequence(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.BloomConfig(vocab_size=512, hidden_size=16, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(files / "bloom")
    transformers.AutoTokenizer.from_pretrained(STORIES).save_pretrained(files / "bloom")
    task = make(files, model=str(files / "bloom"))
    assert task.score(task.initial_model())["loss"] > 0
    assert int(task._tests[""][0].examples.max()) == 1
    assert "BloomForCausalLM lets examples of one sequence see each other" in capsys.readouterr().err


def test_answers_are_compared_as_texts_and_as_numbers(files: Path) -> None:
    write(files / "north.jsonl", [{"prompt": "x = ?", "response": "2.5"}])
    write(files / "test.jsonl", [{"prompt": "x = ?", "response": text} for text in ("2.5", "3.5", "none")])
    task = make(files, facilities=1, measures=["exact_match", "numeric_error"], answer_tokens=8, score="exact_match")
    trained = task.train(facility=0, model=task.initial_model(), steps=40, learning_rate=5e-3, key=1)
    assert trained.loss < 2
    found = task.score(trained.model)
    assert found["exact_match"] == found["score"] == pytest.approx(1 / 3)
    assert (found["numeric_error"], found["numeric_answers"]) == (pytest.approx(0.5), 1.0)


# Adapters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("averaging", ["plain", "product", "frozen-a"])
def test_products_of_adapters_are_averaged_as_said(files: Path, averaging: str) -> None:
    from benchmarks.adapters import error_of
    from fedqueue.aggregate import Contribution, aggregate, roles_of

    task = make(files, lora={"rank": 2, "averaging": averaging})
    first = task.initial_model()
    roles = roles_of(first, task.declared_roles())
    trained = [task.train(facility=k, model=first, steps=4, learning_rate=2e-2, key=1).model for k in range(2)]
    made = aggregate(first, [Contribution(weight=0.5, trained=t, base=first) for t in trained], "add_deltas", roles)
    error = error_of(made, trained, first)
    by_hand = {name: (trained[0][name] + trained[1][name]) / 2 for name in first}
    plain_error = error_of(by_hand, trained, first)
    if averaging == "plain":
        assert error == pytest.approx(plain_error, rel=1e-3)
        assert error > 0.01
    elif averaging == "product":
        assert error < plain_error, "of all products of that rank none is nearer"
    else:
        assert error < 1e-5
        assert all(torch.equal(made[name], first[name]) for name in first if "lora_A" in name)


# Whole runs -----------------------------------------------------------------------------------------------

CONFIG = """
[run]
strategy = "fedavg"
rounds = 2
round_length = 600.0
learning_rate = 0.003
targets = [-3.0]

[strategy.fedavg]
steps = 2
stay = 3000.0

[task]
name = "causal-lm"
optimizer = "adamw"
batch_size = 2

[model]
moments = "shared"

[task.options]
model = "{model}"
train = {{ north = "north.jsonl", south = "south.jsonl" }}
test = "test.jsonl"
sequence_length = 192

[worker]
poll_seconds = 0.2

[[facility]]
name = "south"
steps_per_second = 1.0
queue = {{ kind = "fixed", delay = 0.1 }}

[[facility]]
name = "north"
steps_per_second = 1.0
queue = {{ kind = "fixed", delay = 0.1 }}
"""


@pytest.mark.parametrize("lora", [None, {"rank": 2, "averaging": "product"}], ids=["whole", "adapters"])
def test_a_real_run_makes_the_models_of_the_simulated_one(files: Path, lora: dict[str, Any] | None) -> None:
    """Through the built-in queue, with jobs that stay; of adapters, what comes out is what peft reads."""
    config = files / "lm.toml"
    config.write_text(CONFIG.format(model=STORIES) + ("" if lora is None else "[task.options.lora]\n"))
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in (lora or {}).items())
    config.write_text(config.read_text() + text)
    argv = [sys.executable, "-m", "fedqueue", "run", str(config), "--json", "--no-plots", "--out", "run"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout)
    assert real["jobs"]["submitted"] == 2, "they stayed"
    from fedqueue.sim.runner import simulate

    simulated = simulate(load(config))
    assert real["score"]["final"] == pytest.approx(simulated["score"]["final"], rel=1e-4)
    assert real["score"]["final"] > -5

    from safetensors.torch import load_file

    from fedqueue.training.causal_lm import main as export

    model = real["models"]["newest"]["file"]
    tensors = load_file(model)
    assert all("lora_" in name for name in tensors) == (lora is not None)
    assert export(["run", model, "made"]) == 0
    if lora is None:
        made = transformers.AutoModelForCausalLM.from_pretrained("made")
        assert distance({name: t for name, t in made.state_dict().items() if name in tensors}, tensors) == 0
    else:
        adapted = peft.AutoPeftModelForCausalLM.from_pretrained("made")
        found = peft.get_peft_model_state_dict(adapted)
        assert distance({name: found[name] for name in tensors}, tensors) == 0
    assert with_template(transformers.AutoTokenizer.from_pretrained("made")).chat_template == PLAIN_TEMPLATE


# Files and settings ---------------------------------------------------------------------------------------

GOOD = {"prompt": "a", "completion": "b"}
FORMS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "a", "input": "", "output": "b"},
    GOOD,
    {"prompt": "a", "response": "b", "id": 7},
    {"question": "a", "answer": "b"},
    {"input": "a", "output": "b"},
]


def test_usual_forms_are_known_and_others_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", FORMS)
    for found in read_conversations(path):
        assert found.messages == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write(path, [{"head": "a", "body": "c", "reply": 3, "rule": "r", "kind": "k"}])
    fields = FieldSettings(prompt=["head", "body"], answer="reply", system="rule")
    (found,) = read_conversations(path, fields, label="kind")
    assert [message["content"] for message in found.messages] == ["r", "a\n\nc", "3"]
    assert found.label == "k"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object, found list"),
        ('{"text": "a"}', r"has none of the usual fields .* only 'text'; say in task\.options\.fields"),
        ('{"prompt": "a", "completion": null}', "field 'completion' must be a text, found NoneType"),
        ('{"prompt": "", "completion": "b"}', "field 'prompt' is empty"),
        ('{"messages": []}', "field 'messages' must be a list of messages"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "message 1 has role 'robot'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "the last message must be the assistant's, found user"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}, line 3.*{reason}") as caught:
        read_conversations(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora": {"rnak": 4}}, r"task\.options\.lora\.rnak: unknown key; did you mean rank"),
        ({"train": {"north": "n.jsonl"}}, r"task\.options\.train: .* each facility once: north, south"),
        ({"score": "exact_match"}, r"task\.options\.score is \"exact_match\", so measures must have it too"),
        ({"fields": {"prompt": ["a"]}}, r"task\.options\.fields\.prompt and answer belong together"),
    ],
)
def test_a_wrong_option_is_refused_when_the_config_is_read(options: dict[str, Any], reason: str) -> None:
    task = {"name": "causal-lm", "options": {"model": "m", "test": "t.jsonl", **options}}
    tree = {"run": {"rounds": 1}, "task": task, "facility": [{"name": "north"}, {"name": "south"}]}
    with pytest.raises(ConfigError, match=reason):
        parse(tree)


def test_a_folder_that_is_no_model_and_data_that_nobody_names_are_refused(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = files / "lm.toml"
    config.write_text(CONFIG.format(model="nowhere"))
    assert main(["simulate", str(config), "--no-plots", "--out", "run"]) != 0
    assert f"{files}/nowhere is neither a folder with a config.json nor a .gguf file" in capsys.readouterr().err
    config.write_text(CONFIG.format(model=STORIES).replace("train =", "# train ="))
    assert main(["simulate", str(config), "--no-plots", "--out", "run"]) == 2
    assert "task.options.train: is missing" in capsys.readouterr().err


def test_one_file_is_shared_out_by_a_label(files: Path) -> None:
    rows = [{**row, "kind": "dogs" if "dogs" in str(row["instruction"]) else "others"} for row in ROWS]
    shared = str(write(files / "all.jsonl", rows))
    task = make(files, train=shared, label="kind")
    assert sum(task.data_sizes()) == len(ROWS)
    assert task.score(task.initial_model())["loss"] > 0, "its test file needs no label"
    with pytest.raises(ConfigError, match=r"needs task\.options\.label"):
        make(files, train=shared)


def trained_alike(one: Any, other: Any, first: dict[str, Any]) -> bool:
    """Adam makes steps of one size of gradients of any size: those near zero may turn."""
    moved = [(one.model[name] - other.model[name]).abs() for name in first]
    close = sum(float((d > 1e-5).sum()) for d in moved) < 0.01 * sum(d.numel() for d in moved)
    same = (one.samples, one.loss) == (other.samples, pytest.approx(other.loss, rel=1e-5))
    trained = {name: one.model[name] for name in first}
    return close and same and distance(trained, first) > 1e-4


def job(**fields: Any) -> dict[str, Any]:
    """Of a few steps."""
    return {"facility": 0, "steps": 3, "learning_rate": 1e-4, "key": 2, **fields}


def test_steps_that_are_recorded_are_those_that_are_written(files: Path) -> None:
    """On a processor, where nothing is recorded but the same is done: masks, means over the answers, the optimizer."""
    from fedqueue.aggregate import roles_of
    from fedqueue.moments import no_moments
    from fedqueue.protocol.aggregation import split_moments

    for options in ({}, {"packing": False, "sequences_at_once": 3}):
        task = make(files, batch_size=4, facilities=1, **options)
        first = task.initial_model()
        # Moments shared, with and without a last change of the model.
        nobodys = {**first, **no_moments(first, roles_of(first))}
        shared = {**first, **split_moments(task.train(**job(model=nobodys, key=3)).model)[1]}
        moved = {name: torch.full_like(tensor, 1e-5) for name, tensor in first.items()}
        jobs = [job(model=first, key=1), job(model=shared, key=1), job(model=shared, change=moved), job(model=first)]
        written = [task.train(**one) for one in jobs]
        assert "not on an accelerator" in task._why_not_recorded
        task._why_not_recorded = None
        task.record_steps()
        for one, before in zip(jobs, written, strict=True):  # what the first leaves does not reach the second
            again = task.train(**one)
            assert trained_alike(again, before, first)
            assert set(again.model) == set(before.model) == set(one["model"])
        assert distance(written[1].model, written[2].model) > 1e-6
        assert len(task._recorded) == 1


def test_layers_are_compiled_once_and_train_as_they_are_written(files: Path) -> None:
    from torch._dynamo.utils import counters

    plain, compiled = make(files, facilities=1), make(files, facilities=1, compile=True)
    first = plain.initial_model()
    counters.clear()
    after = [task.train(facility=0, model=first, steps=3, learning_rate=1e-4, key=1) for task in (plain, compiled)]
    assert trained_alike(after[1], after[0], first)
    assert counters["stats"]["unique_graphs"] == 1, "five layers that are alike, and nothing else"
    scores = [task.score(trained.model)["loss"] for task, trained in zip((plain, compiled), after, strict=True)]
    assert scores[1] == pytest.approx(scores[0], rel=1e-4)
    assert counters["stats"]["unique_graphs"] == 1, "sequences of any length are scored without compiling"


def test_runs_side_by_side_are_those_of_runs_alone_and_their_records_have_every_facility(files: Path) -> None:
    from fedqueue_reproduction.record import run_record
    from fedqueue_reproduction.side_by_side import run_side_by_side

    rows = [
        {**row, "kind": str(row["instruction"]).split()[-1], "use": "test" if n % 4 == 0 else "train"}
        for n, row in enumerate(ROWS)
    ]
    write(files / "all.jsonl", rows)
    task = {
        "name": "causal-lm",
        "optimizer": "adamw",
        "batch_size": 2,
        "options": {
            "model": str(STORIES),
            "train": "all.jsonl",
            "test": "all.jsonl",
            "split": "use",
            "label": "kind",
            "labels": {"north": ["dogs?", "ants?"], "south": ["birds?"]},
            "sequence_length": 192,
            "answers": 1,
            "answer_tokens": 2,
        },
    }
    configs = [
        parse(
            {
                "run": {"strategy": strategy, "seconds": 40.0, "round_length": 10.0, "learning_rate": 1e-3},
                "task": task,
                "strategy": {"fedqueue": {"min_steps": 1}, "fedasync": {"steps": 2}},
                "facility": [facility("north", steps_per_second=0.4), facility("south", steps_per_second=0.2)],
            },
            folder=files,
        )
        for strategy in ("fedqueue", "fedasync", "fedqueue")
    ]
    keep = ("answers", "errors", "facilities")

    def work(number: int, learned: Any) -> dict[str, Any]:
        return run_record(configs[number], learned, keep=keep)

    found = dict(run_side_by_side(configs, work, device="cpu", at_once=2))
    assert set(found) == {0, 1, 2}
    for number, record in found.items():
        alone = run_record(configs[number], keep=keep)
        assert {**record, "wall_seconds": 0} == {**alone, "wall_seconds": 0}
        theirs = record["facilities"]
        for key in ("admitted", "deferred"):
            assert sum(one[key] for one in theirs.values()) == record["updates"][key]
        assert sum(one["submitted"] for one in theirs.values()) == record["jobs"]["submitted"]
        assert all([at for at, _ in one["losses"]] == [at for at, *_ in record["curve"]] for one in theirs.values())
        assert record["loss"]["final"] == -record["score"]["final"]
        assert record["first_loss"] > record["loss"]["least"], "it learns"
        assert {"exact_match/north", "exact_match/south"} <= set(record["answers"])


# Files ----------------------------------------------------------------------------------------------------


def test_one_file_has_all_questions_of_all_facilities_for_training_and_testing(files: Path) -> None:
    kinds = {"dogs": "mammals", "birds": "birds", "ants": "insects"}
    rows = [
        {**row, "kind": kinds[str(row["instruction"]).split()[-1][:-1]], "use": "test" if number % 4 == 0 else "train"}
        for number, row in enumerate(ROWS)
    ]
    write(files / "all.jsonl", rows)
    shared: dict[str, Any] = {"train": str(files / "all.jsonl"), "test": str(files / "all.jsonl")}
    chosen: dict[str, Any] = {"split": "use", "label": "kind"}
    labels = {"north": ["mammals", "insects"], "south": ["birds"]}
    task = make(files, **shared, **chosen, labels=labels)
    assert task.data_sizes() == (6, 3)
    first = task.initial_model()
    found = task.score(first)
    for name in labels:
        own = write(
            files / f"own-{name}.jsonl", [row for row in rows if row["kind"] in labels[name] and row["use"] == "test"]
        )
        assert found[f"loss/{name}"] == pytest.approx(make(files, test=str(own)).score(first)["loss"], rel=1e-5)
    answers = task.examine(first)
    assert {"exact_match", "exact_match/north", "exact_match/south"} <= set(answers)
    assert "loss" not in answers, "that is what its score is for"
    with pytest.raises(ConfigError, match=r"labels\.south: no record has 'fish'"):
        make(files, **shared, **chosen, labels={"north": ["birds"], "south": ["fish"]}).data_sizes()
    with pytest.raises(DataError, match=r"all\.jsonl, line 1: has no field 'part', by which task\.options\.split"):
        make(files, **shared, split="part", label="kind", labels=labels).data_sizes()
    with pytest.raises(ConfigError, match="labels needs label"):
        make(files, **shared, labels=labels)


def test_gguf_file_has_the_model_of_the_folder_it_was_made_of_and_trains(files: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs fedqueue[gguf]")
    from safetensors.torch import load_file

    config = json.loads((STORIES / "config.json").read_text())
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(files / "small.gguf", "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for name, tensor in load_file(STORIES / "model.safetensors").items():
        place = gguf_name(name)
        if "attn_q" in place or "attn_k" in place:  # the two halves of a head are interleaved there
            count = heads if "attn_q" in place else groups
            rows, width = tensor.shape
            tensor = tensor.view(count, 2, rows // count // 2, width).swapaxes(1, 2).reshape(rows, width)
        writer.add_tensor(place, tensor.float().numpy())
    # A token a byte, one of two bytes, and others that no text has.
    letters = [*map(chr, (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)))]
    letters.append("ow")
    fillers = (f"<{number}>" for number in range(config["vocab_size"] - 2 - len(letters)))
    tokens = [*letters, *fillers, "<s>", "</s>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["o w"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder, file = make(files), make(files, model=str(files / "small.gguf"), sequence_length=384)
    assert distance(folder.initial_model(), file.initial_model()) < 1e-6
    trained = file.train(facility=0, model=file.initial_model(), steps=2, learning_rate=1e-4, key=1)
    assert distance(trained.model, file.initial_model()) > 1e-5
    assert file.score(trained.model)["loss"] < file.score(file.initial_model())["loss"]


def gguf_name(name: str) -> str:
    """
    >>> gguf_name("model.layers.3.self_attn.q_proj.weight")
    'blk.3.attn_q.weight'
    """
    parts = {
        **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
        **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers": "blk",
        "lm_head": "output",
    }
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name
