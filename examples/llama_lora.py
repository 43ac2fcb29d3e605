"""A small LLaMA with adapters, by the Trainer of transformers. Only the adapters leave the site.

python llama_lora.py --first first.safetensors    write the first adapters of a run
python llama_lora.py [--base FOLDER]              take part, or try it here; FOLDER has a pretrained LLaMA
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fedqueue
from fedqueue.integrations.huggingface import FedQueueCallback


class Adapted(nn.Module):
    """A frozen linear layer plus a product of two small matrices that train."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen
        self.lora_a = nn.Parameter(torch.randn(rank, frozen.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(frozen.out_features, rank))  # so that it starts as the frozen one

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        frozen: torch.Tensor = self.frozen(inputs)
        return frozen + inputs @ self.lora_a.T @ self.lora_b.T


def make_model(base: Path | None) -> LlamaForCausalLM:
    if base is not None:
        model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    else:
        config = LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
        model = LlamaForCausalLM(config)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return model


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}


def make_data(vocabulary: int, rows: int = 64) -> list[dict[str, torch.Tensor]]:
    """Stands in for the texts of this site: numbers counting up."""
    starts = torch.randint(vocabulary, (rows, 1))
    texts = (starts + torch.arange(16)) % vocabulary
    return [{"input_ids": text, "labels": text} for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path)
    parser.add_argument("--first", type=Path)
    arguments = parser.parse_args()
    model = make_model(arguments.base)
    if arguments.first:
        save_file(adapters(model), arguments.first)
        return

    with fedqueue.participate(dry_run={"model": "first.safetensors", "steps": 20, "learning_rate": 1e-2}) as work:
        for part in work.parts():  # once, or again and again if the job stays
            training = TrainingArguments(
                output_dir=str(part.state_dir / "trainer"),
                max_steps=part.assigned_steps,
                learning_rate=part.learning_rate,
                lr_scheduler_type="constant",
                per_device_train_batch_size=8,
                logging_steps=5,
                save_strategy="no",
                report_to=[],
            )
            data = make_data(model.config.vocab_size)
            Trainer(model, training, train_dataset=data, callbacks=[FedQueueCallback(part)]).train()


if __name__ == "__main__":
    main()
