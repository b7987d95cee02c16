"""Loops of libraries around a model: Lightning, Hugging Face's Trainer and accelerate, DistributedDataParallel."""

from __future__ import annotations

import tempfile
from typing import Any, Callable

import torch
from torch.nn import functional as F

from common import images, labels, program, resnet10, sgd


class Batches(torch.utils.data.Dataset):
    """Images and labels of ten classes."""

    def __init__(self, count: int, dtype: torch.dtype, size: int = 64, names: tuple[str, str] | None = None):
        self.images, self.labels, self.names = images(0, count, size, dtype), labels(0, count), names

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> Any:
        item = self.images[place], self.labels[place]
        return item if self.names is None else dict(zip(self.names, item))


# --- Lightning ------------------------------------------------------------------------------------------------------


def lightning_module(dtype: torch.dtype) -> torch.nn.Module:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = resnet10(dtype)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    # A class inside of a function has a name that pickle does not find; copies do not need it.
    return Classifier()


def lightning_train(dtype: torch.dtype) -> Callable[..., None]:
    def train(model: torch.nn.Module, steps: int, done: Callable[[Any], None]) -> None:
        import lightning

        class Record(lightning.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
                done(outputs["loss"])

        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=steps,
            gradient_clip_val=1.0,
            precision="64-true" if dtype is torch.float64 else "32-true",
            val_check_interval=2,
            limit_val_batches=1,
            num_sanity_val_steps=1,
            callbacks=[Record()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        load = lambda count: torch.utils.data.DataLoader(Batches(count, dtype), batch_size=4)
        trainer.fit(model, load(4 * steps), load(4))

    return train


@program("lightning", "torchvision", own_loop=True)
def lightning_whole_module(dtype):
    return lightning_module(dtype), lightning_train(dtype)


@program("lightning", "torchvision", own_loop=True, parts=("net",))
def lightning_net_of_module(dtype):
    return lightning_module(dtype), lightning_train(dtype)


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def hf_resnet(dtype: torch.dtype) -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48], depths=[1, 1, 1], layer_type="basic", num_labels=10
    )
    return ResNetForImageClassification(config).to(dtype)


def hf_convnext(dtype: torch.dtype) -> torch.nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], drop_path_rate=0.2, num_labels=10)
    return ConvNextForImageClassification(config).to(dtype)


def hf_train(dtype: torch.dtype, **options: Any) -> Callable[..., None]:
    def train(model: torch.nn.Module, steps: int, done: Callable[[Any], None]) -> None:
        from transformers import Trainer, TrainingArguments

        class Recording(Trainer):
            def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                loss = super().training_step(*args, **kwargs)
                done(loss)
                return loss

        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=4,
                learning_rate=1e-3,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_strategy="no",
                **options,
            )
            Recording(
                model=model, args=arguments, train_dataset=Batches(4 * steps, dtype, names=("pixel_values", "labels"))
            ).train()

    return train


@program("transformers", "accelerate", own_loop=True)
def hf_resnet_trainer(dtype):
    return hf_resnet(dtype), hf_train(dtype)


@program("transformers", "accelerate", own_loop=True)
def hf_convnext_trainer(dtype):
    return hf_convnext(dtype), hf_train(dtype, optim="adamw_torch")


def accelerate_start(dtype: torch.dtype) -> Callable[..., Any]:
    """Gradients of two batches are added before a step."""

    def start(model: torch.nn.Module) -> Callable[[int], torch.Tensor]:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        prepared, optimizer = accelerator.prepare(model, sgd(model))

        def step(number: int) -> torch.Tensor:
            with accelerator.accumulate(prepared):
                result = prepared(pixel_values=images(number, 4, 64, dtype), labels=labels(number, 4))
                accelerator.backward(result.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            return result.loss

        return step

    return start


@program("transformers", "accelerate")
def accelerate_resnet(dtype):
    return hf_resnet(dtype), accelerate_start(dtype)


@program("transformers", "accelerate")
def accelerate_convnext(dtype):
    return hf_convnext(dtype), accelerate_start(dtype)


# --- PyTorch's own --------------------------------------------------------------------------------------------------


def one_rank() -> None:
    """A process group of this process alone."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


@program("torchvision")
def ddp_around_optimized(dtype):
    """DistributedDataParallel around a model that is optimized, with one batch in two that is not synchronized."""

    def start(model):
        one_rank()
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = sgd(ddp)

        def step(number):
            optimizer.zero_grad()
            with ddp.no_sync():
                first = F.cross_entropy(ddp(images(number, 4, 64, dtype)), labels(number, 4))
                first.backward()
            loss = F.cross_entropy(ddp(images(number + 50, 4, 64, dtype)), labels(number + 50, 4))
            loss.backward()
            optimizer.step()
            return first, loss

        return step

    return resnet10(dtype), start


@program("torchvision")
def ddp_optimized_itself(dtype):
    """DistributedDataParallel that is optimized as the model that it is."""
    one_rank()

    def start(ddp):
        optimizer = sgd(ddp)

        def step(number):
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(images(number, 4, 64, dtype)), labels(number, 4))
            loss.backward()
            optimizer.step()
            return loss

        return step

    return torch.nn.parallel.DistributedDataParallel(resnet10(dtype)), start
