"""Times training steps of one of convoke's models in JAX: prints seconds and memory as JSON. Run by steps.py.

    python tools/peers/jax_steps.py MODEL BATCH THREADS WARM_UP STEPS

The whole step is one jitted function on the CPU backend, its arguments donated, images N x H x W x C.
"""

import json
import os
import resource
import statistics
import sys
import time

name, batch, threads, warm_up, steps = sys.argv[1:]
# XLA has no flag for the number of threads; it takes the processors that this process may use.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MOMENTUM, EPS = 0.1, 1e-5


class Model:
    """Declares parameters if none are given, else reads them."""

    def __init__(self, parameters=None, statistics=None):
        self.declaring = parameters is None
        self.parameters, self.statistics = parameters or {}, statistics or {}
        self.updated, self.count = {}, 0

    def parameter(self, kind, shape):
        key = f"{self.count:03}.{kind}"
        if self.declaring:
            random = np.random.default_rng(self.count)
            scale = {"conv": np.sqrt(2 / np.prod(shape[:-1])), "linear": 1 / np.sqrt(shape[0])}.get(kind, 0)
            value = random.standard_normal(shape) * scale + (kind == "scale")
            self.parameters[key] = jnp.asarray(value, jnp.float32)
        return self.parameters[key]

    def conv(self, x, width, kernel=3, stride=1, padding=None):
        self.count += 1
        padding = kernel // 2 if padding is None else padding
        weight = self.parameter("conv", (kernel, kernel, x.shape[-1], width))
        return lax.conv_general_dilated(
            x, weight, (stride, stride), [(padding, padding)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def norm(self, x):
        self.count += 1
        width, key = x.shape[-1], f"{self.count:03}"
        scale, bias = self.parameter("scale", (width,)), self.parameter("bias", (width,))
        if self.declaring:
            self.statistics[key] = (jnp.zeros(width), jnp.ones(width))
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        old, rows = self.statistics[key], x.size // width
        self.updated[key] = (
            old[0] + MOMENTUM * (mean - old[0]), old[1] + MOMENTUM * (var * rows / max(rows - 1, 1) - old[1])
        )
        return (x - mean) * (lax.rsqrt(var + EPS) * scale) + bias

    def conv_bn(self, x, width, kernel=3, stride=1, padding=None, relu=True):
        x = self.norm(self.conv(x, width, kernel, stride, padding))
        return jax.nn.relu(x) if relu else x

    def linear(self, x, width):
        self.count += 1
        return x @ self.parameter("linear", (x.shape[-1], width)) + self.parameter("bias", (width,))


def pool(x, size, stride, padding=0):
    sides = [(0, 0), (padding, padding), (padding, padding), (0, 0)]
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, size, size, 1), (1, stride, stride, 1), sides)


def mnist_cnn(m, x, key):
    x = pool(m.conv_bn(m.conv_bn(x, 32, padding=0), 64, padding=0), 2, 2).reshape(x.shape[0], -1)
    x = m.linear(x, 128)
    x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * 2, 0)
    return m.linear(jax.nn.relu(x), 10)


def residual(m, x, block, widths, counts, expansion, classes):
    for stage, (width, count) in enumerate(zip(widths, counts)):
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            same = stride == 1 and x.shape[-1] == width * expansion
            path = block(m, x, width, stride)
            x = jax.nn.relu(path + (x if same else m.conv_bn(x, width * expansion, 1, stride, relu=False)))
    return m.linear(x.mean((1, 2)), classes)


def resnet20(m, x, key):
    def block(m, x, width, stride):
        return m.conv_bn(m.conv_bn(x, width, 3, stride), width, relu=False)

    return residual(m, m.conv_bn(x, 16), block, [16, 32, 64], [3, 3, 3], 1, 10)


def resnet50(m, x, key):
    def block(m, x, width, stride):
        return m.conv_bn(m.conv_bn(m.conv_bn(x, width, 1), width, 3, stride), 4 * width, 1, relu=False)

    return residual(m, pool(m.conv_bn(x, 64, 7, 2), 3, 2, 1), block, [64, 128, 256, 512], [3, 4, 6, 3], 4, 1000)


def segnet(m, x, key):
    def level(x, width):
        return m.conv_bn(m.conv_bn(x, width), width)

    skipped = []
    for width in (16, 32, 64):
        skipped.append(level(x, width))
        x = pool(skipped[-1], 2, 2)
    x = level(x, 128)
    for width in (64, 32, 16):
        n, height, columns, channels = x.shape
        x = jax.image.resize(x, (n, 2 * height, 2 * columns, channels), "bilinear")
        x = level(jnp.concatenate([x, skipped.pop()], -1), width)
    return m.linear(x, 11)


MODELS = {
    "mnist-cnn": (mnist_cnn, (28, 28, 1), 10, False),
    "resnet20": (resnet20, (32, 32, 3), 10, False),
    "resnet50": (resnet50, (224, 224, 3), 1000, False),
    "segnet": (segnet, (120, 160, 3), 11, True),
}


def main():
    network, shape, classes, pixels = MODELS[name]
    random = np.random.default_rng(1)
    images = jnp.asarray(random.standard_normal((int(batch), *shape)), jnp.float32)
    labels = jnp.asarray(random.integers(classes, size=(int(batch), *(shape[:2] if pixels else ()))))
    declared = Model()
    network(declared, images[:1], jax.random.key(0))
    parameters, statistics_ = declared.parameters, declared.statistics

    def loss(parameters, statistics_, key):
        m = Model(parameters, statistics_)
        logits = jax.nn.log_softmax(network(m, images, key))
        return -jnp.take_along_axis(logits, labels[..., None], -1).mean(), m.updated

    def adadelta(parameters, gradients, state, rho=0.9, eps=1e-6):
        squares = jax.tree.map(lambda s, g: rho * s + (1 - rho) * g * g, state[0], gradients)
        deltas = jax.tree.map(lambda g, s, d: g * jnp.sqrt(d + eps) / jnp.sqrt(s + eps), gradients, squares, state[1])
        kept = jax.tree.map(lambda d, x: rho * d + (1 - rho) * x * x, state[1], deltas)
        return jax.tree.map(lambda p, x: p - x, parameters, deltas), (squares, kept)

    def sgd(parameters, gradients, state):
        state = jax.tree.map(lambda v, g: 0.9 * v + g, state, gradients)
        return jax.tree.map(lambda p, v: p - 0.01 * v, parameters, state), state

    def step(parameters, statistics_, state, key):
        (value, statistics_), gradients = jax.value_and_grad(loss, has_aux=True)(parameters, statistics_, key)
        parameters, state = rule(parameters, gradients, state)
        return parameters, statistics_, state, value

    # Buffers that are donated must not be shared.
    zeros = lambda: jax.tree.map(jnp.zeros_like, parameters)
    rule, state = (adadelta, (zeros(), zeros())) if name == "mnist-cnn" else (sgd, zeros())
    step = jax.jit(step, donate_argnums=(0, 1, 2))
    seconds = []
    for index in range(int(warm_up) + int(steps)):
        start = time.perf_counter()
        parameters, statistics_, state, value = step(parameters, statistics_, state, jax.random.key(index))
        value.block_until_ready()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": statistics.median(seconds[int(warm_up) :]), "first": seconds[0], "bytes": peak}))


main()
