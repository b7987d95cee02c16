"""Threads, forks, interrupts and errors: nothing hangs, and training goes on."""

import faulthandler
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings

import pytest
import torch
from torch import nn

import torch_convoke
from conftest import in_convoke, on_threads
from torch_convoke import _engine, _threads


def model():
    torch.manual_seed(0)
    return torch_convoke.optimize(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
        )
    )


X = torch.linspace(-1, 1, 4 * 3 * 32 * 32).reshape(4, 3, 32, 32)


def step(model):
    loss = model(X).square().mean()
    loss.backward()
    return loss.item()


def test_threads_follow_pytorch_and_the_machine():
    threads = torch.get_num_threads()
    try:
        for wanted in (1, 2):
            torch.set_num_threads(wanted)
            assert _threads.engine().threads == min(wanted, _engine.available_threads())
        trained = model()
        torch.set_num_threads(1)
        one = step(trained)
        torch.set_num_threads(2)
        assert abs(step(trained) - one) <= 1e-5 * abs(one)
    finally:
        torch.set_num_threads(threads)
    assert _threads.engine(1).threads == 1
    with pytest.raises(ValueError, match="threads"):
        torch_convoke.optimize(nn.ReLU(), threads=0)


@pytest.mark.skipif(torch.get_num_threads() < 2 or not _threads.HELPED, reason="PyTorch has no OpenMP threads that could help")
def test_pytorchs_threads_help_and_steps_stay_the_same():
    # With another number of threads in PyTorch, the engine's own threads do all the work.
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    layers = torch_convoke.optimize(nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()), threads=threads)

    def step():
        result = layers(X)
        return [result, *torch.autograd.grad(result.square().sum(), list(layers.parameters()))]

    try:
        torch.set_num_threads(threads + 1)
        alone = step()
    finally:
        torch.set_num_threads(threads)
    helped = step()
    # TorchDynamo captures for each number of threads.
    assert in_convoke(layers) == 2
    assert all(torch.equal(one, other) for one, other in zip(alone, helped, strict=True))

    # Several graphs at once, each in a region of its own or without help, with PyTorch's operations in between.
    def many():
        for _ in range(5):
            numbers = torch.ones(1 << 18).add_(1)
            assert all(torch.equal(one, other) for one, other in zip(step(), helped, strict=True)) and numbers.sum() == 1 << 19

    on_threads([many] * 3)


#: Seconds after which a child hangs.
HANGS = 20


def in_child(work, traces=sys.__stderr__):
    """The exit status of a forked child that does something; one that hangs writes where to `traces`, and ends with 1."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.dump_traceback_later(HANGS, exit=True, file=traces)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return os.waitpid(child, 0)[1]


def test_forks_have_threads_of_their_own():
    """PyTorch allows no backward in a fork of a process that had one, so children only run forward, as workers of a DataLoader."""
    trained = model()
    expected = step(trained)
    with torch.no_grad():
        output = trained(X)

    def forward():
        with torch.no_grad():
            assert (trained(X) - output).abs().max() <= 1e-5

    for _ in range(100):
        assert in_child(forward) == 0
        assert abs(step(trained) - expected) <= 1e-5 * abs(expected)


def test_forks_wait_for_kernels_of_other_threads(tmp_path):
    trained, stop, errors = model(), threading.Event(), []
    started = threading.Semaphore(0)
    step(trained)

    def work():
        try:
            own = model()
            step(own)
            started.release()
            while not stop.is_set():
                step(own)
        except Exception as error:
            errors.append(error)

    def forward():
        with torch.no_grad():
            trained(X)

    # Captured once, and not in each child.
    forward()
    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    try:
        # Nobody captures while the process forks: the locks of imports and of TorchDynamo are their own.
        assert all(started.acquire(timeout=60) for _ in workers)
        # A child that finds a lock which another thread held at that moment, such as one of PyTorch's own, hangs: that is rare.
        with open(tmp_path / "hung", "w+") as traces:
            failed = sum(in_child(forward, traces) != 0 for _ in range(50))
            text = (traces.seek(0), traces.read())[1]
        assert failed == text.count("Timeout (") <= 1, text
        if failed:
            warnings.warn(f"a forked child hung:\n{text}")
    finally:
        stop.set()
        for worker in workers:
            worker.join(60)
    assert not errors


def test_fifty_threads_use_one_model():
    trained = model().eval()
    with torch.no_grad():
        expected = trained(X)

    def work():
        with torch.no_grad():
            for _ in range(5):
                assert torch.equal(trained(X), expected)

    on_threads([work] * 50, seconds=60)


def test_training_goes_on_after_an_error_in_backward():
    trained = model()
    expected = step(trained)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("on purpose")

    engine = _threads.engine()
    for _ in range(3):
        with pytest.raises(KeyError, match="on purpose"):
            Fails.apply(trained(X)).sum().backward()
    assert abs(step(trained) - expected) <= 1e-5 * abs(expected)
    assert engine.memory()[0] >= 0


def test_ctrl_c_ends_training():
    # Where a shell runs tests in the background, their children ignore the signal.
    script = """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        import torch, torch_convoke
        from torch import nn
        model = torch_convoke.optimize(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()))
        x = torch.randn(8, 3, 32, 32)
        model(x).sum().backward()
        print("trains", flush=True)
        while True:
            model(x).sum().backward()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "trains\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode not in (0, -signal.SIGKILL) and "KeyboardInterrupt" in errors


def test_without_pytorch_the_import_says_what_to_install():
    script = "import sys; sys.modules['torch'] = None; import torch_convoke"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1 and "pip install torch" in found.stderr
