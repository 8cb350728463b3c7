"""What tests of training libraries run on ranks: four steps of a tiny model, loss logged at each."""

from __future__ import annotations


def train(directory: str) -> tuple[int, int]:
    """Train by Lightning, then by Transformers; return how many steps each of them took."""
    return fit_lightning(directory), train_transformers(directory)


def fit_lightning(directory: str, devices: int | str = 2) -> int:
    """Train by Lightning, with its DDP on two devices; return the number of steps."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = self.layer(batch[0]).pow(2).mean()
            self.log("lightning_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if devices == "auto" else "ddp",
        max_epochs=1,
        default_root_dir=directory,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
    return int(trainer.global_step)


def train_transformers(directory: str) -> int:
    """Train by Transformers' Trainer; return the number of steps."""
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainingArguments,
    )

    config = BertConfig(
        vocab_size=64,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=2,
    )
    data = [{"input_ids": torch.arange(6) + i, "labels": i % 2} for i in range(32)]
    arguments = TrainingArguments(
        directory,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=["tensorboard"],
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data)
    trainer.train()
    return int(trainer.state.global_step)
