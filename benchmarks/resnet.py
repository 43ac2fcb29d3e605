"""Local steps of ResNet-18 on an accelerator, against a plain loop tuned by hand in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.figure import Figure
from fedqueue.training.workload import Samples, Workload
from fedqueue_reproduction.cifar100 import CLASSES, ResNet18, crop_and_flip
from fedqueue_reproduction.fleet import LANES
from fedqueue_reproduction.lanes import Lanes, rows_of
from fedqueue_reproduction.recorded import SlotJob, capture

BATCH = 64
STEPS = 200
REPEATS = 5
RATE = 0.003
IMAGES = 50_000


def measure() -> list[Figure]:
    if not torch.cuda.is_available():
        return []
    device = torch.device("cuda")
    # Any images: what a step costs does not depend on them.
    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8, device=device)
    samples = images, torch.randint(0, CLASSES, (IMAGES,), device=device)
    name = f"ResNet-18, {torch.cuda.get_device_name()}"
    eager, _ = _rate(lambda: _plain_loop(samples, tuned=False))
    plain, plain_gigabytes = _rate(lambda: _plain_loop(samples, tuned=True))
    one, one_gigabytes = _rate(lambda: _lanes(samples, 1))
    many, many_gigabytes = _rate(lambda: _lanes(samples, LANES), jobs=LANES)
    return [
        Figure(f"{name}: images a second, a plain eager loop in bfloat16", eager, "1/s"),
        Figure(f"{name}: images a second, a plain loop compiled and recorded", plain, "1/s"),
        Figure(f"{name}: memory of that loop", plain_gigabytes, "GB"),
        Figure(f"{name}: images a second, one job", one, "1/s"),
        Figure(f"{name}: memory of one job", one_gigabytes, "GB"),
        Figure(f"{name}: one job, over the compiled loop", one / plain, "x", "at least 0.8"),
        Figure(f"{name}: images a second, {LANES} jobs side by side", many, "1/s"),
        Figure(f"{name}: memory of {LANES} jobs", many_gigabytes, "GB"),
        Figure(f"{name}: {LANES} jobs side by side, over the compiled loop", many / plain, "x", "at least 1"),
    ]


def _plain_loop(samples: Samples, *, tuned: bool) -> Callable[[], None]:
    """As one writes it by hand, with everything on the device; tuned: what is fastest, the same bits or not."""
    inputs, targets = samples
    torch.backends.cudnn.deterministic = not tuned
    torch.backends.cudnn.benchmark = tuned
    module = ResNet18().cuda().train()
    forward = torch.compile(module, dynamic=False) if tuned else module
    alter = torch.compile(crop_and_flip, dynamic=False) if tuned else crop_and_flip
    optimizer = torch.optim.Adam(module.parameters(), lr=RATE, fused=True, capturable=tuned)
    order = torch.randperm(IMAGES, device=inputs.device)
    batch = order[:BATCH].clone()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        drawn = torch.randint(0, 1 << 40, (BATCH,), device=inputs.device)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = nn.functional.cross_entropy(forward(alter(inputs[batch], drawn)), targets[batch])
        torch.autograd.backward(loss)
        optimizer.step()

    graph = capture(step, inputs.device) if tuned else None

    def loop() -> None:
        for number in range(STEPS):
            batch.copy_(order[number * BATCH : (number + 1) * BATCH])
            if graph is None:
                step()
            else:
                graph.replay()

    return loop


def _lanes(samples: Samples, count: int) -> Callable[[], None]:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    workload = Workload(
        make_model=ResNet18,
        train=samples,
        test=samples,
        augment=crop_and_flip,
        precision=torch.bfloat16,
        recordable=True,
    )
    module = workload.make_model()
    rows = rows_of(module)
    row = rows.flatten(module.state_dict()).cuda()
    lanes = Lanes(workload, rows, samples, slots=count, batch_size=BATCH)

    def batches(number: int) -> Tensor:
        return torch.randint(0, IMAGES, (STEPS, BATCH), generator=torch.Generator().manual_seed(number))

    jobs = {number: SlotJob(row, batches(number), RATE, number) for number in range(count)}

    def work() -> None:
        lanes.load(jobs)
        lanes.advance(STEPS)

    return work


def _rate(make: Callable[[], Callable[[], None]], jobs: int = 1) -> tuple[float, float]:
    """Images a second, the median of a few times; and the memory it took, in GB."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    work = make()
    work()
    taken = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return jobs * STEPS * BATCH / statistics.median(taken), (torch.cuda.max_memory_reserved() - before) / 1e9
