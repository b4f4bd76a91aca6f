"""Train the demo model. See README.md for the command that made the committed one.

    python lab/demo_model/train.py TOKENS.npz OUT [--steps N] [--seconds S] ...

With --seconds the number of steps is set from the speed of the first steps; it is printed, and --steps repeats the run.
Writes OUT/log.csv, and OUT/best/ (config, weights) whenever the validation modules' bits per byte improve in the second half.
The held-out modules are never looked at here."""

import argparse
import csv
import math
import sys
import time
from pathlib import Path

import config
import delta
import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5

WARMUP, TIMED = 100, 40  # steps


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=config.CONTEXT)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--lr", type=float, default=0.03, help="of Muon, or of AdamW if that is the only one")
    parser.add_argument("--adam-lr", type=float, default=0.006, help="embedding, norms, gates, when Muon has the rest")
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.05, help="of what each branch adds to the residual; training only")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--evals", type=int, default=24)
    return parser.parse_args()


def batches(data, args: argparse.Namespace, device: str):
    """Endless [batch, length + 1] windows over shuffled documents; library modules come twice in a pass, tests once."""
    documents = []
    for group, times in (("library", 2), ("tests", 1)):
        ends = np.cumsum(data[group + "_lengths"])[:-1]
        documents += np.split(data[group].astype(np.int64), ends) * times
    random = np.random.default_rng(args.seed)
    rest = np.empty(0, np.int64)
    span = args.length + 1
    while True:
        order = random.permutation(len(documents))
        stream = np.concatenate([rest, *(documents[i] for i in order)])
        count = len(stream) // span
        rest = stream[count * span :]
        rows = torch.from_numpy(stream[: count * span].reshape(count, span)[random.permutation(count)]).to(device)
        for i in range(0, count - args.batch + 1, args.batch):
            yield rows[i : i + args.batch]


def validation_windows(data, batch: int, device: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """score.py's windows over the validation modules, padded on the right: inputs, targets (-100 = none), text bytes."""
    size = config.CONTEXT
    rows, wanted = [], []
    for ids in np.split(data["validation"].astype(np.int64), np.cumsum(data["validation_lengths"])[:-1]):
        for i in range(0, len(ids) - 1, size):
            target = ids[i + 1 : i + size + 1]
            wanted.append(np.pad(target, (0, size - len(target)), constant_values=-100))
            rows.append(np.pad(ids[i : i + len(target)], (0, size - len(target))))
    while len(rows) % batch:  # one shape only, so that one compiled graph serves
        rows.append(np.zeros_like(rows[0]))
        wanted.append(np.full_like(wanted[0], -100))
    rows, wanted = (torch.from_numpy(np.stack(x)).to(device) for x in (rows, wanted))
    return rows, wanted, int(data["validation_bytes"].sum())


def optimizers(model: torch.nn.Module, args: argparse.Namespace, device: str) -> list[torch.optim.Optimizer]:
    """Muon for the big matrices inside the layers, AdamW for the rest; or AdamW for all. Only matrices decay."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and ".layers." in n and min(p.shape) > 16]
    chosen = {id(p) for p in matrices}
    embedding = [p for n, p in named if "embed_tokens" in n]
    small = [p for _, p in named if id(p) not in chosen | {id(e) for e in embedding}]
    shared = {"betas": (0.9, 0.95), "eps": 1e-8, "fused": device == "cuda"}
    if args.optimizer == "adamw":
        groups = [{"params": matrices + embedding, "weight_decay": args.decay}, {"params": small, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=args.lr, **shared)]
    groups = [{"params": embedding, "weight_decay": args.decay / 10}, {"params": small, "weight_decay": 0.0}]
    muon = torch.optim.Muon(matrices, lr=args.lr, weight_decay=args.decay, momentum=0.95)
    return [muon, torch.optim.AdamW(groups, lr=args.adam_lr, **shared)]


def add_dropout(model: torch.nn.Module, p: float) -> None:
    """Dropout on the output of every projection back into the residual stream; the architecture itself has none."""
    for name, module in model.named_modules():
        if p and name.endswith(("out_proj", "o_proj", "down_proj")):
            module.register_forward_hook(lambda module, _, out: F.dropout(out, p, module.training))


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to 1 percent."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


class Trainer:
    """One run. `loss` and `evaluate` are the only places that call the model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_float32_matmul_precision("high")
        self.rearrange()
        self.data = dict(np.load(args.tokens))
        self.model = config.build(args.seed).to(self.device).train()
        add_dropout(self.model, args.dropout)
        if args.compile:
            torch._dynamo.config.recompile_limit = 64
            for layer in self.model.model.layers:
                layer.compile()
        self.optimizers = optimizers(self.model, args, self.device)
        self.batches = batches(self.data, args, self.device)
        self.validation = validation_windows(self.data, args.batch, self.device)
        self.best = math.inf
        self.steps = args.steps

    def rearrange(self) -> None:
        """Put the training forms of delta.py into transformers' module, after comparing them (TF32 products)."""
        errors = delta.rule_difference(modeling_qwen3_5.torch_chunk_gated_delta_rule, self.device)
        errors["conv"] = delta.conv_difference(modeling_qwen3_5.causal_conv1d_fn, self.device)
        print("training forms against transformers:", errors)
        if not max(errors.values()) < 5e-3:
            raise ValueError(f"train: the training forms differ: {errors}")
        modeling_qwen3_5.torch_chunk_gated_delta_rule = delta.chunk_delta_rule
        modeling_qwen3_5.causal_conv1d_fn = delta.causal_conv1d

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Validation bits per byte under autocast."""
        rows, wanted, size = self.validation
        self.model.eval()
        parts = zip(rows.split(self.args.batch), wanted.split(self.args.batch), strict=True)
        with torch.compiler.set_stance("force_eager"):
            nats = sum(self.loss(r, w, "sum").item() for r, w in parts)
        self.model.train()
        return nats / math.log(2) / size

    def step(self, index: int) -> torch.Tensor:
        rows = next(self.batches)
        loss = self.loss(rows[:, :-1], rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * rate(index, self.steps or 1_000_000)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def plan(self, index: int, since: float, start: float) -> None:
        """Set the number of steps from the measured speed."""
        if not self.steps and index == 2 * TIMED:
            each = (time.time() - since) / TIMED
            self.steps = index + int((self.args.seconds - (time.time() - start)) / each / 1.03)
            print(f"{each * 1e3:.1f} ms a step: --steps {self.steps}", flush=True)

    def run(self) -> None:
        self.args.out.mkdir(parents=True, exist_ok=True)
        tokens = self.args.batch * self.args.length
        start = since = time.time()
        total, counted, index = 0.0, 0, 0
        with open(self.args.out / "log.csv", "w", newline="") as file:
            log = csv.writer(file)
            log.writerow(["step", "tokens", "seconds", "train_nats", "validation_bits_per_byte", "tokens_per_second"])
            while not self.steps or index < self.steps:
                total, counted = total + self.step(index), counted + 1
                index += 1
                if index == TIMED or index == 2 * TIMED:
                    if self.device == "cuda":
                        torch.cuda.synchronize()
                    self.plan(index, since, start)
                    since = time.time() if index == TIMED else since
                if self.steps and (index % max(1, self.steps // self.args.evals) == 0 or index == self.steps):
                    mean = float(total) / counted
                    value, spent = self.evaluate(), time.time() - start
                    row = [index, index * tokens, f"{spent:.1f}", f"{mean:.4f}", f"{value:.4f}", int(index * tokens / spent)]
                    log.writerow(row)
                    file.flush()
                    print(*row, flush=True)
                    total, counted = 0.0, 0
                    if value < self.best and index >= self.steps / 2:
                        self.best = value
                        config.save(self.model.state_dict(), self.args.out / "best")
        print(f"best validation {self.best:.4f} bits per byte; {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    Trainer(arguments()).run()
