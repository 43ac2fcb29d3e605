"""Model files: headers from anyone, the streamed sum against the one in memory, and memory that stays small."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

from fedqueue import aggregate as in_memory
from fedqueue import tensorbytes, tensorfile, tensorsum
from fedqueue.aggregate import Contribution, StateDict
from fedqueue.errors import StorageError
from fedqueue.protocol.messages import ServerStep
from fedqueue.tensorbytes import HEADER_LIMIT
from fedqueue.tensorfile import (
    Content,
    TensorFileError,
    check,
    describe,
    read_header,
    select,
    write,
)
from fedqueue.tensorsum import FileContribution, FileStep

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
quick = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


def model(generator: torch.Generator, dtype: torch.dtype = torch.float32, step: int = 0) -> StateDict:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "weight": draw(5, 7),
        "scalar": draw(),
        "empty": draw(0, 3),
        "odd": draw(33),
        "norm.num_batches_tracked": torch.tensor(step),
        "mask": torch.tensor([step % 2 == 0, True, False]),
    }


def file_bytes(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def refused_or_read(work: Callable[[], object]) -> None:
    """Only a `TensorFileError` of one line may come of it."""
    try:
        work()
    except TensorFileError as error:
        said = str(error)
    else:
        said = ""
    assert "\n" not in said


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Headers ----


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a whole one (0 bytes)"),
        (b"\0" * 7, "not a whole one (7 bytes)"),
        (b"\0" * 8, "cannot be read"),
        (b"\xff" * 8 + b"{}", "not a whole one"),
        (file_bytes(b"\xff\xfe"), "cannot be read: 'utf-8'"),
        (file_bytes(b"{"), "cannot be read"),
        (file_bytes(b"[" * 100_000), "nested too deeply"),
        (file_bytes(b'{"a": ' + b"9" * 5000 + b"}"), "cannot be read"),
        (file_bytes([1]), "no JSON object"),
        (file_bytes(b'{"a": 1, "a": 2}'), "a key appears twice"),
        (file_bytes({"__metadata__": {"a": 1}}), "__metadata__ is no object of strings"),
        (file_bytes({"__metadata__": {"a": "\ud800"}}), "__metadata__ is no valid text"),
        (file_bytes({"\ud800": entry()}, bytes(4)), "no valid text"),
        (file_bytes({"a" * 513: entry()}, bytes(4)), "no valid text of 512 characters"),
        (file_bytes({"a": 1}), "must have dtype, shape and data_offsets"),
        (file_bytes({"a": {**entry(), "more": 1}}, bytes(4)), "and nothing else"),
        (file_bytes({"a": entry("F31")}, bytes(4)), "has dtype 'F31', expected one of BOOL"),
        (file_bytes({"a": entry(["F32"])}, bytes(4)), "has dtype"),
        (file_bytes({"a": entry(shape=[-1])}, bytes(4)), "no list of at most 64 whole numbers"),
        (file_bytes({"a": entry(shape=[True])}, bytes(4)), "no list of at most 64 whole numbers"),
        (file_bytes({"a": entry(shape=[1.0])}, bytes(4)), "no list of at most 64 whole numbers"),
        (file_bytes({"a": entry(shape=[1] * 65)}, bytes(4)), "no list of at most 64 whole numbers"),
        (file_bytes({"a": entry(shape=[2**40, 2**40, 0], offsets=[0, 0])}), "too large to exist"),
        (file_bytes({"a": entry(offsets=[0])}, bytes(4)), "not two whole numbers"),
        (file_bytes({"a": entry(offsets=[4, 0])}, bytes(4)), "not what its shape needs"),
        (file_bytes({"a": entry(shape=[2])}, bytes(4)), "not what its shape needs"),
        (file_bytes({"a": entry(offsets=[4, 8])}, bytes(8)), "does not begin where"),
        (file_bytes({"a": entry(), "b": entry()}, bytes(4)), "does not begin where"),
        (file_bytes({"a": entry()}, bytes(3)), "but its header speaks of"),
        (file_bytes({"a": entry()}, bytes(5)), "but its header speaks of"),
    ],
)
def test_a_header_that_is_not_sound_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (path := tmp_path / "m").write_bytes(content)
    with pytest.raises(TensorFileError) as caught:
        read_header(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    with (path := tmp_path / "m").open("wb") as file:
        file.write((HEADER_LIMIT + 1).to_bytes(8, "little"))
        file.truncate(HEADER_LIMIT + 100)
    with pytest.raises(TensorFileError, match="more than the 67,108,864 allowed"):
        read_header(path)


@pytest.mark.parametrize("path", [Path("/nowhere"), Path("/")])
def test_a_file_that_cannot_be_read_is_named(path: Path) -> None:
    with pytest.raises(TensorFileError):
        read_header(path)


VALID = file_bytes(
    {
        "__metadata__": {"format": "pt"},
        "a": entry(),
        "b.weight": entry("BF16", [2, 1], [4, 8]),
        "c": entry("I64", [0], [8, 8]),
    },
    bytes(8),
)


@quick
@given(content=st.binary(max_size=200) | st.binary(max_size=200).map(file_bytes))
def test_random_bytes_are_refused_or_read_and_nothing_else(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "m").write_bytes(content)
    refused_or_read(lambda: read_header(path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["F32", "BOOL"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@quick
@given(
    header=st.dictionaries(
        st.text(max_size=5) | st.just("__metadata__"),
        JSON | st.fixed_dictionaries({"dtype": JSON, "shape": JSON, "data_offsets": JSON}),
        max_size=3,
    )
)
def test_any_json_is_refused_or_read_and_nothing_else(tmp_path: Path, header: dict[str, Any]) -> None:
    (path := tmp_path / "m").write_bytes(file_bytes(header))
    refused_or_read(lambda: read_header(path))


@settings(quick, max_examples=300)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, len(VALID)) | st.just(len(VALID)),
    more=st.binary(max_size=3),
)
def test_a_damaged_file_is_refused_or_read_and_nothing_else(
    tmp_path: Path, edits: list[tuple[int, int]], cut: int, more: bytes
) -> None:
    content = bytearray(VALID)
    for place, value in edits:
        content[place] = value
    (like := tmp_path / "like").write_bytes(VALID)
    (path := tmp_path / "m").write_bytes(bytes(content[:cut]) + more)
    for sum_of in (None, hashlib.sha256(VALID).hexdigest()):
        reason = check(path, like, content=None if sum_of is None else Content(sum_of))
        assert reason is None or "\n" not in reason
    refused_or_read(lambda: tensorsum.aggregate(path, [contribution(path, path)], "add_deltas", tmp_path / "out"))
    assert not (tmp_path / "out.part").exists()


# With the safetensors package ----


@quick
@given(seed=st.integers(0, 2**32), dtype=st.sampled_from(REAL))
def test_what_safetensors_writes_is_read(tmp_path: Path, seed: int, dtype: torch.dtype) -> None:
    state = model(torch.Generator().manual_seed(seed), dtype)
    save_file(state, path := tmp_path / "m", metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.kinds() == {
        name: tensorfile.Kind(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in state.items()
    }
    assert check(path, path, content=Content(sha256(path))) is None


def test_what_is_written_safetensors_reads(tmp_path: Path) -> None:
    names = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
    names += ["float16", "float32", "float64", "complex64"]
    tensors: dict[str, np.ndarray[Any, Any]] = {
        f"a {name} ü\n": (np.arange(6) % 2).astype(name).reshape(2, 3) for name in names
    }
    tensors |= {"turned": np.arange(6.0).reshape(2, 3).T, "big": np.arange(3, dtype=">f4"), "none": np.zeros((0, 2))}
    tensors["scalar"] = np.array(2.0)
    path = tmp_path / "m"
    assert write(path, tensors, metadata={"made": "here"}).sha256 == sha256(path)
    found = load_numpy(path)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)
    assert describe(path) == tensorfile.Description(len(tensors), 6 * 13 + 6 + 3 + 0 + 1, path.stat().st_size)
    assert not (tmp_path / "m.part").exists()


def test_an_array_the_format_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match="has type complex128"):
        write(tmp_path / "m", {"a": np.zeros(2, complex)})


def test_a_file_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        write(tmp_path / "nowhere" / "m", {"a": np.zeros(2)})


def test_select_takes_the_tensors_whose_names_match(tmp_path: Path) -> None:
    tensors = {
        "base.weight": np.ones(3),
        "a.lora_A": np.arange(4.0),
        "b.lora_B": np.zeros(2, np.int8),
        "head": np.ones(1),
    }
    path, out = tmp_path / "m", tmp_path / "out"
    save_numpy(tensors, path)
    assert select(path, out, ["*.lora_*", "head"]).sha256 == sha256(out)
    found = load_numpy(out)
    assert found.keys() == tensors.keys() - {"base.weight"}
    assert all(np.array_equal(found[name], tensors[name]) for name in found)
    with pytest.raises(TensorFileError, match="no tensor's name matches 'x' or 'y'"):
        select(path, out, ["x", "y"])


# Checking ----


def changed(name: str, tensor: torch.Tensor) -> StateDict:
    return model(torch.Generator().manual_seed(2)) | {name: tensor}


BAD = torch.tensor([1.0, np.nan, -np.inf])


@pytest.mark.parametrize(
    "update",
    [
        model(torch.Generator().manual_seed(2)),
        model(torch.Generator().manual_seed(2), torch.bfloat16),
        {"weight": torch.zeros(5, 7)},
        changed("extra", BAD),
        changed("weight", torch.zeros(7, 5)),
        changed("scalar", torch.tensor(1)),
        changed("mask", torch.ones(3)),
        changed("scalar", torch.tensor(torch.inf).bfloat16()),
        changed("scalar", torch.tensor(torch.nan).half()),
        changed("odd", torch.full((33,), -torch.inf).double()),
    ],
    ids=lambda update: None,
)
def test_check_gives_the_reason_that_misfit_gives(tmp_path: Path, update: StateDict) -> None:
    like = model(torch.Generator().manual_seed(3))
    save_file(like, tmp_path / "like")
    save_file(update, path := tmp_path / "update")
    reason = check(path, tmp_path / "like", content=Content(sha256(path)))
    wanted = in_memory.misfit(update, like)
    # Of several names the first is told: the file has its own order.
    assert (reason or "").split("'")[2:] == (wanted or "").split("'")[2:]
    assert (reason is None) == (wanted is None)


def test_values_that_are_not_finite_are_counted_over_all_chunks(tmp_path: Path) -> None:
    values = np.zeros(1_000_003, np.float32)
    write(tmp_path / "like", {"a": values})
    values[[0, 262_143, 262_144, 1_000_002]] = np.nan
    write(tmp_path / "update", {"a": values})
    assert check(tmp_path / "update", tmp_path / "like") == "tensor 'a' has 4 of 1,000,003 values that are not finite"


def test_a_complex_value_counts_once(tmp_path: Path) -> None:
    write(tmp_path / "like", {"a": np.zeros(3, np.complex64)})
    write(tmp_path / "update", {"a": np.array([complex(np.inf, np.nan), 1, 2], np.complex64)})
    assert check(tmp_path / "update", tmp_path / "like") == "tensor 'a' has 1 of 3 values that are not finite"


def test_a_wrong_sha256_is_told_before_anything_else(tmp_path: Path) -> None:
    write(tmp_path / "like", {"a": np.zeros(3)})
    (tmp_path / "update").write_bytes(b"rubbish")
    assert check(tmp_path / "update", tmp_path / "like") == "is no safetensors file, or not a whole one (7 bytes)"
    found = check(tmp_path / "update", tmp_path / "like", content=Content("00"))
    assert found == f"its sha256 is {sha256(tmp_path / 'update')}, expected 00"


def test_a_header_far_larger_than_the_models_is_not_parsed(tmp_path: Path) -> None:
    write(tmp_path / "like", {"a": np.zeros(3)})
    write(tmp_path / "update", {"a": np.zeros(3)}, metadata={"a": "b" * 100_000})
    found = check(tmp_path / "update", tmp_path / "like")
    assert found is not None
    assert "has a header of" in found


# Summing ----


def contribution(trained: Path, base: Path, weight: float = 0.5) -> FileContribution:
    return FileContribution(weight=weight, trained=trained, base=base, base_key=base.name)


@settings(quick, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(REAL),
    rule=st.sampled_from(["add_deltas", "mix_models"]),
    updates=st.lists(st.tuples(st.floats(0, 1), st.sampled_from(REAL), st.integers(0, 2)), min_size=0, max_size=5),
    chunk=st.sampled_from([1, 4, 1 << 18]),
)
def test_the_streamed_sum_is_that_in_memory(
    tmp_path: Path,
    seed: int,
    dtype: torch.dtype,
    rule: str,
    updates: list[tuple[float, torch.dtype, int]],
    chunk: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bases = [model(generator, dtype) for _ in range(3)]
    for number, base in enumerate(bases):
        save_file(base, tmp_path / f"base{number}")
    states, files = [], []
    for step, (weight, kind, base_number) in enumerate(updates):
        trained = model(generator, kind, step)
        save_file(trained, path := tmp_path / f"update{step}")
        states.append(Contribution(weight=weight, trained=trained, base=bases[base_number]))
        files.append(contribution(path, tmp_path / f"base{base_number}", weight))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorbytes, "CHUNK_VALUES", chunk)
        content = tensorsum.aggregate(tmp_path / "base0", files, rule, out := tmp_path / "out")
    assert content.sha256 == sha256(out)
    result, wanted = load_file(out), in_memory.aggregate(bases[0], states, rule)
    assert result.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert result[name].dtype == tensor.dtype
        assert torch.equal(result[name], tensor), name  # to the last bit, whatever the type


@settings(quick, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(REAL),
    rounds=st.lists(
        st.lists(st.tuples(st.floats(0, 1), st.sampled_from(REAL), st.booleans()), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
    largest=st.booleans(),
    chunk=st.sampled_from([1, 4, 1 << 18]),
)
def test_streamed_steps_of_a_servers_optimizer_are_those_in_memory(
    tmp_path: Path,
    seed: int,
    dtype: torch.dtype,
    rounds: list[list[tuple[float, torch.dtype, bool]]],
    largest: bool,
    chunk: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    step = ServerStep(rate=0.3, beta1=0.9, beta2=0.99, epsilon=0.01, largest=largest)
    first = model(generator, dtype) | {"norm.running_mean": torch.ones(3)}
    save_file(first, first_path := tmp_path / "v0")
    moments: in_memory.Moments = ()
    state, path = first, first_path
    files: list[Path] = []
    for version, updates in enumerate(rounds, 1):
        states, contributions = [], []
        for number, (weight, kind, fresh) in enumerate(updates):
            trained = model(generator, kind, number) | {"norm.running_mean": torch.randn(3, generator=generator)}
            save_file(trained, update := tmp_path / f"update{version}-{number}")
            base, base_path = (state, path) if fresh else (first, first_path)
            states.append(Contribution(weight=weight, trained=trained, base=base))
            contributions.append(contribution(update, base_path, weight))
        state, moments = in_memory.take_step(state, states, "add_deltas", step, moments)
        out = [tmp_path / f"v{version}-{n}" for n in range(step.moments)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensorbytes, "CHUNK_VALUES", chunk)
            contents = tensorsum.take_step(
                path,
                contributions,
                "add_deltas",
                made := tmp_path / f"v{version}",
                FileStep(step=step, moments=files, out=out),
            )
        path, files = made, out
        assert [content.sha256 for content in contents] == [sha256(file) for file in (path, *files)]
        for found, wanted in zip([load_file(file) for file in (path, *files)], [state, *moments], strict=True):
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert found[name].dtype == tensor.dtype
                assert torch.equal(found[name], tensor), name  # to the last bit, whatever the type


def test_a_step_of_complex_numbers_moves_both_parts(tmp_path: Path) -> None:
    write(tmp_path / "now", {"a": np.array([0, 1j], np.complex64)})
    write(tmp_path / "new", {"a": np.array([2 - 2j, 1j], np.complex64)})
    step = ServerStep(rate=1.0, beta1=0.0, beta2=0.0, epsilon=0.5)  # d / (|d| + 1/2)
    files = FileStep(step=step, moments=[], out=[tmp_path / "m", tmp_path / "v"])
    tensorsum.take_step(
        tmp_path / "now", [contribution(tmp_path / "new", tmp_path / "now")], "add_deltas", tmp_path / "o", files
    )
    assert load_numpy(tmp_path / "o")["a"] == pytest.approx(np.array([2 / 3 - 2 / 3 * 1j, 1j]))
    assert load_numpy(tmp_path / "v")["a"].tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_moments_of_another_model_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    write(tmp_path / "now", {"a": np.zeros(2, np.float32)})
    write(tmp_path / "other", {"a": np.zeros(3, np.float32)})
    step = ServerStep(rate=1.0, beta1=0.5, beta2=0.5, epsilon=0.5)
    files = FileStep(step=step, moments=[tmp_path / "other"] * 2, out=[tmp_path / "m", tmp_path / "v"])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TensorFileError, match=r"other: tensor 'a' has shape \(3,\), expected \(2,\)"):
        tensorsum.take_step(
            tmp_path / "now", [contribution(tmp_path / "now", tmp_path / "now")], "add_deltas", tmp_path / "o", files
        )
    assert sorted(tmp_path.iterdir()) == before


def test_complex_tensors_are_summed(tmp_path: Path) -> None:
    write(tmp_path / "now", {"a": np.array([1 + 1j, 2], np.complex64)})
    write(tmp_path / "new", {"a": np.array([3 - 1j, 4j], np.complex64)})
    tensorsum.aggregate(
        tmp_path / "now", [contribution(tmp_path / "new", tmp_path / "now")], "add_deltas", tmp_path / "o"
    )
    assert load_numpy(tmp_path / "o")["a"].tolist() == [2 + 0j, 1 + 2j]


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float16, 65_504.0), (torch.bfloat16, 3.38e38), (torch.float32, 3.4e38)]
)
def test_a_sum_that_overflows_names_the_tensor_and_leaves_nothing(
    tmp_path: Path, dtype: torch.dtype, large: float
) -> None:
    save_file(
        {"fine": torch.zeros(3, dtype=dtype), "hot": torch.full((3,), large, dtype=dtype)}, now := tmp_path / "now"
    )
    save_file({"fine": torch.zeros(3, dtype=dtype), "hot": torch.zeros(3, dtype=dtype)}, old := tmp_path / "old")
    with pytest.raises(TensorFileError, match="tensor 'hot' is not finite once summed"):
        tensorsum.aggregate(now, [contribution(now, old)], "add_deltas", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["now", "old"]


def test_an_update_that_does_not_fit_is_never_summed(tmp_path: Path) -> None:
    write(tmp_path / "now", {"a": np.zeros(3)})
    write(tmp_path / "new", {"a": np.zeros(4)})
    with pytest.raises(TensorFileError, match=r"has shape \(4,\), expected \(3,\)"):
        tensorsum.aggregate(
            tmp_path / "now", [contribution(tmp_path / "new", tmp_path / "now")], "mix_models", tmp_path / "o"
        )


# Memory ----

MEASURE = """
import sys, threading
from pathlib import Path
from fedqueue.tensorfile import check
from fedqueue.tensorsum import FileContribution, aggregate

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

folder, peak, done = Path(sys.argv[1]), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, anonymous())

start = anonymous()
watching = threading.Thread(target=watch)
watching.start()
now = folder / "now"
updates = [folder / f"update{i}" for i in range(4)]
reasons = [check(path, now) for path in updates]
shares = [FileContribution(weight=0.25, trained=path, base=now, base_key=0) for path in updates]
aggregate(now, shares, "add_deltas", folder / "out")
done.set()
watching.join()
assert reasons == [None] * 4, reasons
assert "torch" not in sys.modules
print(peak - start)
"""


def test_four_updates_of_512_mb_are_summed_in_little_memory(tmp_path: Path) -> None:
    layer = np.full(8_000_000, 1.0, np.float32)
    write(tmp_path / "now", {f"layer{i}": layer for i in range(16)})
    for number in range(4):
        (tmp_path / f"update{number}").hardlink_to(tmp_path / "now")
    run = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 150e6
    assert describe(tmp_path / "out").bytes > 512e6
    for path in tmp_path.iterdir():
        path.unlink()
