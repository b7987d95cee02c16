"""Whole models in PyTorch and in convoke: ten steps of those that users train most; a sweep of libraries' models where
CONVOKE_TORCH_MODELS=1, which takes an hour."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import torch_convoke
from conftest import captures, check, in_convoke, loss_of, tensors_of

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")

PEERS = Path(__file__).resolve().parents[2] / "tools" / "peers"
sys.path.insert(0, str(PEERS))
from models import MODELS  # noqa: E402

#: The edge of images in pixels, and how many there are.
TEN_STEPS = {
    "resnet18": (64, 8),
    "resnet34": (64, 4),
    "resnet50": (64, 8),
    "vgg11_bn": (32, 4),
    "mobilenet_v2": (96, 8),
    "densenet121": (64, 8),
    "mnist-cnn": (28, 32),
    "resnet20": (32, 16),
    "segnet": (64, 2),
}


#: The models that run every time; the others take minutes.
IN_F32 = ("resnet18", "mnist-cnn", "resnet20", "segnet")
IN_F64 = (*IN_F32, "mobilenet_v2", "densenet121")
#: A step rounds about so many times as often as one rounding of the parameters.
ROUNDINGS = 100
#: Copies that are shaken by as many roundings: one of them may go for steps without a switch that another meets. And how much more
#: losses may differ than theirs do.
COPIES, MARGIN = 2, 3


def usually(names):
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in TEN_STEPS]


def made(name, dtype, classes=10):
    """The model, images for it, targets, and its loss."""
    torch.manual_seed(0)
    size, batch = TEN_STEPS.get(name, (64, 4))
    if name in MODELS:
        make, shape, classes, pixels, _ = MODELS[name]
        shape = (shape[0], size, size)
        model, loss_of = make(), F.nll_loss
    else:
        make, shape, pixels = torchvision.models.get_model, (3, size, size), False
        model, loss_of = make(name, num_classes=classes), F.cross_entropy
    images = torch.randn(4, batch, *shape, dtype=dtype)
    targets = torch.randint(classes, (4, batch, *(shape[1:] if pixels else ())))
    return model.to(dtype), images, targets, loss_of


def trained(model, images, targets, loss_of, steps):
    """The losses, and the gradients of the first step."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    losses, first = [], None
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(images[step % 4]), targets[step % 4])
        loss.backward()
        first = [parameter.grad.clone() for parameter in model.parameters()] if first is None else first
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64), first


def apart(found, expected):
    """The norm of the difference of all gradients, against theirs."""
    differences = torch.stack([(one - other).norm() for one, other in zip(found, expected, strict=True)])
    return (differences.norm() / torch.stack([other.norm() for other in expected]).norm()).item()


def shaken(model, roundings):
    """A copy whose parameters differ by so many roundings."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1 + roundings * torch.finfo(parameter.dtype).eps * torch.randn_like(parameter))
    return copied


def compare_steps(name, dtype, steps, of_losses, of_gradients, of_state):
    """Training is chaotic: ReLUs and poolings switch where rounding changes an order, and with small images errors grow tenfold in a step. So
    losses, statistics and gradients in f32 may also differ by as much as some roundings of the parameters make of them in PyTorch, and
    gradients by as much as PyTorch's differ from those in f64."""
    expected, images, targets, loss_of = made(name, dtype)
    _, exact = trained(copy.deepcopy(expected).double(), images.double(), targets, loss_of, 1)
    found, others = torch_convoke.optimize(copy.deepcopy(expected)), [shaken(expected, ROUNDINGS) for _ in range(COPIES)]
    once = shaken(expected, 1)
    assert list(found.state_dict()) == list(expected.state_dict())
    wanted, wanted_first = trained(expected, images, targets, loss_of, steps)
    once_losses, once_first = trained(once, images, targets, loss_of, steps)
    shaken_losses, shaken_first = zip(*[trained(other, images, targets, loss_of, steps) for other in others])
    losses, first = trained(found, images, targets, loss_of, steps)
    assert in_convoke(found) == 1, torch_convoke.report(found)
    errors = ((losses - wanted) / wanted).abs()
    # Switches do not grow with what causes them: what one rounding changes, times a hundred, can be nothing.
    factors = torch.tensor([ROUNDINGS, *[MARGIN] * COPIES], dtype=torch.float64)[:, None]
    chaos = (factors * ((torch.stack([once_losses, *shaken_losses]) - wanted) / wanted).abs()).amax(0).cummax(0).values
    noise = max(
        3 * apart(wanted_first, exact),
        ROUNDINGS * apart(once_first, wanted_first),
        *[apart(other, wanted_first) for other in shaken_first],
    )
    gradients, bound = apart(first, exact), max(of_gradients, noise if dtype is torch.float32 else 0.0)
    print(f"{name} in {dtype}: losses {errors.max():.1e} of {chaos.max():.1e}, gradients of the first step {gradients:.1e} of {bound:.1e}")
    assert gradients <= bound and errors[0] <= of_losses
    assert bool((errors <= torch.clamp(chaos, min=of_losses)).all()), (errors, chaos)
    assert list(found.state_dict()) == list(expected.state_dict())
    for (key, one), wanted, shook in zip(found.state_dict().items(), expected.state_dict().values(), once.state_dict().values()):
        if key.endswith("num_batches_tracked"):
            assert one.item() == wanted.item() == steps
        elif "running" in key:
            noise = (shook - wanted).abs().max().item() / max(1.0, wanted.abs().max().item())
            check(one, wanted, max(of_state, ROUNDINGS * noise), key)


@pytest.mark.parametrize("name", usually(IN_F64))
def test_ten_steps_in_f64(name):
    compare_steps(name, torch.float64, 10, 1e-10, 1e-8, 1e-9)


@pytest.mark.parametrize("name", usually(IN_F32))
def test_ten_steps_in_f32(name):
    compare_steps(name, torch.float32, 10, 1e-4, 1e-3, 1e-3)


def of_torchvision():
    names = torchvision.models.list_models(torchvision.models) + torchvision.models.list_models(torchvision.models.segmentation)
    # The weights of these models alone take gigabytes.
    large = ("vit_h", "regnet_y_128gf", "regnet_y_32gf", "convnext_large", "swin_b", "swin_v2_b", "efficientnet_v2_l", "vit_l")
    return [name for name in names if not name.startswith(large)]


TIMM = [
    "convnextv2_atto", "cspresnet50", "darknet53", "dla34", "dpn68", "eca_resnet33ts", "edgenext_xx_small", "efficientnet_lite0",
    "efficientvit_b0", "fastvit_t8", "fbnetc_100", "gernet_s", "ghostnet_100", "hardcorenas_a", "hrnet_w18_small", "inception_v4",
    "lcnet_050", "legacy_senet154", "levit_128s", "mixnet_s", "mobilenetv3_large_100", "mobilenetv4_conv_small", "mobileone_s0",
    "mobilevit_xxs", "nf_resnet50", "poolformer_s12", "regnetx_002", "repvgg_a0", "res2net50_26w_4s", "resnest14d", "resnet18d",
    "resnetv2_50", "resnext26ts", "rexnet_100", "seresnet50", "skresnet18", "tf_efficientnet_b0", "tresnet_m", "vgg11", "vovnet39a",
    "xception41", "dm_nfnet_f0", "bat_resnext26ts", "halonet26t", "botnet26t_256", "coat_lite_tiny", "visformer_tiny", "ese_vovnet19b_dw",
]
SMP = ["Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus", "Segformer"]


def build(library, name):
    if library == "torchvision":
        options = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
        if name in torchvision.models.list_models(torchvision.models.segmentation):
            return torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=4)
        return torchvision.models.get_model(name, weights=None, **options)
    if library == "timm":
        timm = pytest.importorskip("timm", reason="timm is not installed")
        return timm.create_model(name, pretrained=False)
    smp = pytest.importorskip("segmentation_models_pytorch", reason="segmentation-models-pytorch is not installed")
    return getattr(smp, name)("resnet18", encoder_weights=None, classes=3)


SWEEP = [*(("torchvision", name) for name in of_torchvision()), *(("timm", name) for name in TIMM), *(("smp", name) for name in SMP)]


@pytest.mark.slow
@pytest.mark.parametrize("library, name", SWEEP)
def test_models_of_libraries_stay_right(library, name):
    torch.manual_seed(0)
    expected = build(library, name).double()
    size = {"inception_v3": 128, "botnet26t_256": 256, "halonet26t": 256, "levit_128s": 224}.get(name, 224 if "vit" in name or "swin" in name else 64)
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    found = torch_convoke.optimize(copy.deepcopy(expected))
    for model in (expected, found):
        model.train()
        for step in range(2):
            torch.manual_seed(step)
            model.zero_grad()
            results = tensors_of(model(images))
            loss_of(results).backward()
        model.results = [result.detach() for result in results]
    for one, other in zip(found.results, expected.results, strict=True):
        check(one, other, 1e-7, name)
    pairs = [(one.grad, other.grad) for one, other in zip(found.parameters(), expected.parameters())]
    assert all((one is None) == (other is None) for one, other in pairs)
    pairs = [(one, other) for one, other in pairs if other is not None]
    assert apart([one for one, _ in pairs], [other for _, other in pairs]) <= 1e-5
    for (key, one), other in zip(found.named_buffers(), expected.buffers(), strict=True):
        check(one, other, 1e-7, key)
    graphs = captures(found)
    ours = sum(len(subgraph.body) for graph in graphs for subgraph in graph.subgraphs)
    left = sum(len(graph.left) for graph in graphs)
    print(f"SWEEP {library} {name}: {len(graphs)} captures, {in_convoke(found)} subgraphs with {ours} operations, {left} left to PyTorch")
