"""Networks that make images: diffusers' U-Net and autoencoder, and generators against critics."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from common import generator, images, plain, program

# --- diffusers ------------------------------------------------------------------------------------------------------


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4)


@program("diffusers")
def diffusers_unet2d(dtype):
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=32,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    scheduler = DDPMScheduler(num_train_timesteps=100)

    def loss_of(model, number):
        clean = images(number, 4, 32, dtype)
        noise = torch.randn_like(clean)
        times = torch.randint(100, (4,), generator=generator(number))
        return F.mse_loss(model(scheduler.add_noise(clean, noise, times), times).sample, noise)

    return model.to(dtype), plain(loss_of, adamw)


@program("diffusers")
def diffusers_autoencoder(dtype):
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        sample_size=32,
    )

    def loss_of(model, number):
        batch = images(number, 2, 32, dtype)
        return F.mse_loss(model(batch, sample_posterior=True).sample, batch)

    return model.to(dtype), plain(loss_of, adamw)


@program("diffusers", parts=("encoder", "decoder"))
def diffusers_autoencoder_parts(dtype):
    """An autoencoder that is called by its methods: encoder and decoder are optimized; a divergence counts."""
    model, _ = diffusers_autoencoder(dtype)

    def loss_of(model, number):
        batch = images(number, 2, 32, dtype)
        posterior = model.encode(batch).latent_dist
        return F.mse_loss(model.decode(posterior.sample()).sample, batch) + 1e-3 * posterior.kl().mean()

    return model, plain(loss_of, adamw)


# --- Generators against critics -------------------------------------------------------------------------------------


def dcgan_generator(width: int = 16) -> nn.Sequential:
    """Makes images of 32 x 32 pixels of 16 numbers."""

    def up(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]

    return nn.Sequential(
        nn.ConvTranspose2d(16, 4 * width, 4, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(True),
        *up(4 * width, 2 * width),
        *up(2 * width, width),
        nn.ConvTranspose2d(width, 3, 4, 2, 1),
        nn.Tanh(),
    )


def dcgan_critic(
    width: int = 16,
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    wrap: Callable[..., nn.Module] = lambda layer: layer,
) -> nn.Sequential:
    """A number for each image of 32 x 32 pixels. `wrap` is put around each layer with weights."""
    layers: list[nn.Module] = [wrap(nn.Conv2d(3, width, 4, 2, 1)), nn.LeakyReLU(0.2, True)]
    for inputs in (width, 2 * width):
        layers += [wrap(nn.Conv2d(inputs, 2 * inputs, 4, 2, 1)), norm(2 * inputs), nn.LeakyReLU(0.2, True)]
    return nn.Sequential(*layers, wrap(nn.Conv2d(4 * width, 1, 4)), nn.Flatten())


def adversarial(
    dtype: torch.dtype,
    critic_loss: Callable[[Any, torch.Tensor, torch.Tensor, int], torch.Tensor],
    generator_loss: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., Any]:
    """`start` for a generator and a critic that are trained in turn."""

    def start(model: nn.ModuleDict) -> Callable[[int], Any]:
        generator, critic = model["generator"], model["critic"]
        optimizers = [torch.optim.SGD(part.parameters(), 0.01, momentum=0.5) for part in (generator, critic)]

        def step(number: int) -> Any:
            real = images(number, 4, 32, dtype)
            noise = torch.randn(4, 16, 1, 1, dtype=dtype)
            optimizers[1].zero_grad()
            of_critic = critic_loss(critic, real, generator(noise).detach(), number)
            of_critic.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            of_generator = generator_loss(critic(generator(noise)))
            of_generator.backward()
            optimizers[0].step()
            return of_critic, of_generator

        return step

    return start


def logistic(critic: Any, real: torch.Tensor, fake: torch.Tensor, number: int) -> torch.Tensor:
    return F.softplus(critic(fake)).mean() + F.softplus(-critic(real)).mean()


def fooled(scores: torch.Tensor) -> torch.Tensor:
    return F.softplus(-scores).mean()


def hinge(critic: Any, real: torch.Tensor, fake: torch.Tensor, number: int) -> torch.Tensor:
    return F.relu(1 + critic(fake)).mean() + F.relu(1 - critic(real)).mean()


BOTH = ("generator", "critic")


@program(parts=BOTH)
def dcgan(dtype):
    model = nn.ModuleDict({"generator": dcgan_generator(), "critic": dcgan_critic()})
    return model.to(dtype), adversarial(dtype, logistic, fooled)


@program(parts=BOTH, quick=True)
def dcgan_r1(dtype):
    """A penalty on the critic's gradient at real images, which is differentiated again."""
    model = nn.ModuleDict({"generator": dcgan_generator(), "critic": dcgan_critic()})

    def critic_loss(critic, real, fake, number):
        real = real.requires_grad_()
        scores = critic(real)
        (gradient,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        penalty = gradient.square().flatten(1).sum(1).mean()
        return F.softplus(critic(fake)).mean() + F.softplus(-scores).mean() + 0.5 * penalty

    return model.to(dtype), adversarial(dtype, critic_loss, fooled)


@program(parts=BOTH)
def dcgan_r1_every_other_step(dtype):
    """The penalty comes in every other step only, as in StyleGAN's lazy regularization."""
    model = nn.ModuleDict({"generator": dcgan_generator(), "critic": dcgan_critic()})

    def critic_loss(critic, real, fake, number):
        loss = logistic(critic, real, fake, number)
        if number % 2 == 1:
            real = real.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
            loss = loss + gradient.square().flatten(1).sum(1).mean()
        return loss

    return model.to(dtype), adversarial(dtype, critic_loss, fooled)


@program(parts=BOTH)
def wgan_gp(dtype):
    """A penalty on the norm of the critic's gradient between real and made images."""
    norm = lambda channels: nn.InstanceNorm2d(channels, affine=True)
    model = nn.ModuleDict({"generator": dcgan_generator(), "critic": dcgan_critic(norm=norm)})

    def critic_loss(critic, real, fake, number):
        share = torch.rand(4, 1, 1, 1, dtype=dtype)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        return critic(fake).mean() - critic(real).mean() + 10 * penalty

    return model.to(dtype), adversarial(dtype, critic_loss, lambda scores: -scores.mean())


@program(parts=BOTH)
def spectral_norm_gan(dtype):
    critic = dcgan_critic(norm=lambda _: nn.Identity(), wrap=parametrizations.spectral_norm)
    model = nn.ModuleDict({"generator": dcgan_generator(), "critic": critic})
    return model.to(dtype), adversarial(dtype, hinge, lambda scores: -scores.mean())


@program(parts=BOTH)
def spectral_norm_by_hooks_gan(dtype):
    """The older spectral norm, which is a forward hook that writes to buffers."""
    critic = dcgan_critic(norm=lambda _: nn.Identity(), wrap=torch.nn.utils.spectral_norm)
    model = nn.ModuleDict({"generator": dcgan_generator(), "critic": critic})
    return model.to(dtype), adversarial(dtype, hinge, lambda scores: -scores.mean())


@program(parts=BOTH)
def weight_norm_gan(dtype):
    critic = dcgan_critic(norm=lambda _: nn.Identity(), wrap=parametrizations.weight_norm)
    model = nn.ModuleDict({"generator": dcgan_generator(), "critic": critic})
    return model.to(dtype), adversarial(dtype, hinge, lambda scores: -scores.mean())
