"""Pretrain sprout, a Llama of about five million parameters, on the packed token streams beside this file.

    python pretrain.py --name muon --minutes 5 --out runs      one run on a GPU
    python pretrain.py --smoke --out runs                      20 tiny steps on a CPU, end to end

The unit of work is a step over `--batch-tokens` tokens: random windows of the stream, one forward and backward pass,
one update. Time is the budget, so the learning rate is a function of progress, the share of the budget already spent:
a short warm-up, a plateau, then linear to zero. Weights are fp32, matrix products bf16 (autocast) on a GPU.

The model is walked layer by layer in `final_hidden` rather than called: under torch.compile, transformers builds an
explicit causal mask for torch < 2.14, which keeps scaled_dot_product_attention off its flash kernel.

Shapes: B windows, T positions, D width, V vocabulary.
"""
import argparse
import json
import lzma
import math
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
HEAD_WIDTH = 64
WARMUP_STEPS = 100
DECAY_FROM = 0.3  # progress at which the learning rate starts to fall
WEIGHT_DECAY = 0.1  # of matrices only
EMBEDDING_LR = 4e-3  # AdamW, also for the norms
MATRIX_LR = {"adamw": 4e-3, "muon": 8e-3}
LOG_EVERY, EVAL_EVERY = 50, 1000  # steps
EVAL_WINDOWS = 32  # windows in one evaluation batch
QUICK_EVAL_STRIDE = 8  # evaluations during training use every 8th window


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest semi-orthogonal matrix by five Newton-Schulz steps (Jordan et al., 2024).

    The same update as torch.optim.Muon(adjust_lr_fn="match_rms_adamw"): its root mean square is 0.2 lr, as AdamW's is.
    Matrices of one shape are stacked and orthogonalised together: a tiny model would otherwise wait on kernel launches.
    """

    def __init__(self, matrices, lr, weight_decay, momentum=0.95):
        shapes = sorted({m.shape for m in matrices})
        groups = [{"params": [m for m in matrices if m.shape == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            matrices = group["params"]
            gradient = torch.stack([m.grad for m in matrices])
            velocity = self.state[matrices[0]].setdefault("velocity", torch.zeros_like(gradient))
            velocity.lerp_(gradient, 1 - group["momentum"])
            direction = orthogonalise(gradient.lerp(velocity, group["momentum"]))  # Nesterov
            scale = 0.2 * math.sqrt(max(gradient.shape[-2:])) * group["lr"]
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, list(direction.to(gradient.dtype).unbind()), alpha=-scale)


def orthogonalise(stack):
    """Newton-Schulz iteration on a stack of matrices (N, rows, columns), in bf16."""
    tall = stack.shape[-2] > stack.shape[-1]
    x = (stack.mT if tall else stack).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def make_optimisers(model, name, lr, device):
    """[optimiser of the matrices, optimiser of the embedding and the norms]."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    adamw = {"betas": (0.9, 0.95), "fused": device == "cuda"}
    if name == "muon":
        of_matrices = Muon(matrices, lr=lr, weight_decay=WEIGHT_DECAY)
    else:
        of_matrices = torch.optim.AdamW(matrices, lr=lr, weight_decay=WEIGHT_DECAY, **adamw)
    return [of_matrices, torch.optim.AdamW(others, lr=EMBEDDING_LR, weight_decay=0.0, **adamw)]


def load_tokens(name, device):
    """The stream `name`.bin.xz as an int32 tensor; decompressed once, beside the archive."""
    plain = HERE / f"{name}.bin"
    if not plain.exists():
        unfinished = plain.with_suffix(".part")
        unfinished.write_bytes(lzma.decompress((HERE / f"{name}.bin.xz").read_bytes()))
        unfinished.rename(plain)
    return torch.from_numpy(np.fromfile(plain, dtype="<u2").astype(np.int32)).to(device)


def make_model(width, layers, context, vocabulary):
    heads = width // HEAD_WIDTH
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 9 // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2 if heads % 2 == 0 else heads, head_dim=HEAD_WIDTH,
        max_position_embeddings=context, tie_word_embeddings=True, attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=0, eos_token_id=0, pad_token_id=0))


def final_hidden(decoder, ids_BT):
    """Hidden states (B, T, D) after the last norm; without a mask, attention is causal and takes the flash kernel."""
    x_BTD = decoder.embed_tokens(ids_BT)
    positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
    rotary = decoder.rotary_emb(x_BTD, position_ids=positions)
    for layer in decoder.layers:
        x_BTD = layer(x_BTD, attention_mask=None, position_embeddings=rotary)
    return decoder.norm(x_BTD)


def window_loss(model, windows, reduction="mean"):
    """Next-token loss in nats of windows (B, T + 1)."""
    ids_BT, targets_BT = windows[:, :-1], windows[:, 1:]
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        logits_BTV = model.lm_head(final_hidden(model.model, ids_BT))
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), reduction=reduction)


def draw_windows(tokens, count, context, generator):
    starts = torch.randint(len(tokens) - context, (count, 1), device=tokens.device, generator=generator)
    return tokens[starts + torch.arange(context + 1, device=tokens.device)].long()


@torch.no_grad()
def bits_per_byte(model, tokens, text_bytes, context, stride=1):
    """Bits spent on a byte of text, over every `stride`-th of the full windows; bytes in proportion to tokens."""
    windows = tokens[:(len(tokens) - 1) // context * context + 1].unfold(0, context + 1, context)[::stride]
    nats = sum(window_loss(model, batch.long(), "sum").item() for batch in windows.split(EVAL_WINDOWS))
    scored_share = windows.shape[0] * context / (len(tokens) - 1)
    return nats / math.log(2) / (text_bytes * scored_share)


def learning_rate_scale(step, progress):
    """Factor on the learning rate: warm-up by steps, then by progress a plateau and a line to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, (1 - progress) / (1 - DECAY_FROM)))


def train(model, args, tokens, evaluate):
    """Train until the budget is spent; returns the measurements of the run."""
    generator = torch.Generator(tokens.device).manual_seed(args.seed)
    optimisers = make_optimisers(model, args.optimiser, args.lr, tokens.device.type)
    groups = [(group, group["lr"]) for optimiser in optimisers for group in optimiser.param_groups]
    loss_function = torch.compile(window_loss, dynamic=False) if tokens.is_cuda else window_loss
    count = args.batch_tokens // args.context

    def forward_backward():
        model.zero_grad(set_to_none=True)
        loss = loss_function(model, draw_windows(tokens, count, args.context, generator))
        loss.backward()
        return loss.detach()

    compile_start = time.time()
    forward_backward().item()  # compiles: before the clock starts
    start, step, progress, curve, evaluations = time.time(), 0, 0.0, [], []
    while progress < 1:
        loss = forward_backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, peak in groups:
            group["lr"] = peak * learning_rate_scale(step, progress)
        for optimiser in optimisers:
            optimiser.step()
        step += 1
        seconds = time.time() - start
        progress = step / args.steps if args.steps else seconds / (60 * args.minutes)
        if step % LOG_EVERY == 0 or progress >= 1:
            curve.append({"step": step, "seconds": round(seconds, 1), "loss": round(loss.item(), 4)})
        if step % EVAL_EVERY == 0:
            evaluations.append({"step": step, "bits_per_byte": round(evaluate(model, QUICK_EVAL_STRIDE), 4)})
            print(args.name, curve[-1], evaluations[-1], flush=True)
    seconds, seen = time.time() - start, step * count * args.context
    return {"steps": step, "tokens": seen, "epochs": round(seen / len(tokens), 2), "seconds": round(seconds, 1),
            "tokens_per_second": round(seen / seconds), "compile_seconds": round(start - compile_start, 1),
            "loss_curve": curve, "evaluations": evaluations}


def export(model, folder):
    """Write the Hugging Face folder: weights in bf16, config, tokeniser."""
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in (HERE / "tokenizer").iterdir():
        shutil.copy(file, folder)


def sample(model, folder, prompt="import json\n\n\ndef read_config(path):\n"):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    return tokenizer.decode(model.generate(**inputs, max_new_tokens=64, do_sample=False)[0])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="sprout")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--optimiser", choices=sorted(MATRIX_LR), default="muon")
    parser.add_argument("--width", type=int, default=256, help=f"a multiple of {HEAD_WIDTH}")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--lr", type=float, help="peak, of the matrices; the default depends on the optimiser")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch-tokens", type=int, default=2**17)
    parser.add_argument("--minutes", type=float, default=5.0, help="training time, without compilation")
    parser.add_argument("--steps", type=int, help="a budget in steps instead of minutes")
    parser.add_argument("--smoke", action="store_true", help="20 tiny steps, to prove the whole path")
    args = parser.parse_args()
    if args.smoke:
        args.width, args.layers, args.context, args.batch_tokens, args.steps = 64, 2, 256, 2048, 20
    args.lr = args.lr or MATRIX_LR[args.optimiser]
    return args


def main():
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    packing = json.loads((HERE / "packing.json").read_text())
    tokens, heldout = load_tokens("train", device), load_tokens("heldout", device)
    if args.smoke:
        heldout = heldout[:50_000]
    text_bytes = packing["heldout"]["bytes"] * len(heldout) / packing["heldout"]["tokens"]

    def evaluate(model, stride):
        return bits_per_byte(model, heldout, text_bytes, args.context, stride)

    vocabulary = len(AutoTokenizer.from_pretrained(HERE / "tokenizer"))
    model = make_model(args.width, args.layers, args.context, vocabulary).to(device)
    measured = train(model, args, tokens, evaluate)
    folder = args.out / args.name
    export(model, folder)
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    metrics = {
        "name": args.name, "bits_per_byte": round(evaluate(exported, 1), 4), "parameters": exported.num_parameters(),
        **measured, "config": {k: v for k, v in vars(args).items() if k not in ("name", "out")},
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__, "transformers": transformers.__version__, "sample": sample(exported, folder)}
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=1))
    print(metrics["sample"], "", sep="\n")
    print(*(f"{k} {metrics[k]}" for k in ("name", "bits_per_byte", "parameters", "steps", "tokens_per_second")), sep="  ")


if __name__ == "__main__":
    main()
