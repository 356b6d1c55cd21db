"""Load a model and its tokeniser from a Hugging Face folder, or say in one line why not; torch is imported where weights are read.

Missing tensors are refused: transformers would fill them with random numbers and go on. So are tensors that the model has no place
for, which it would drop: the model is then not the one that its config names, and its descendants would be without them.

transformers reads tensor by tensor from mapped files, straight onto the device and in the dtype that is asked for: main memory never
holds more than the weights that stay there. Weights of a quantised base (FP8 with block scales, MXFP4) are dequantised on the way,
one by one; what is trained and saved is bf16. GGUF is converted when a base is fetched (`gguf.py`).

Special tokens that a base never learnt are found by their rows, and told apart before they are taught. A token that no text of
pretraining holds is never the answer, so each step moves its row of the output away from where the hidden states are, and in the same
way for all such tokens: they end up as one vector. Sprout's 27 have a cosine of 1.000 and a norm above that of other rows, so
`<tool_call>`, `</tool_call>` and the end of a turn are one to it, to read and to write, and SFT spends most of its steps on pulling
equal vectors apart (lab notes). Other bases with reserved tokens have the same. `tell_apart` draws such rows anew, each dimension as
it is spread over the other tokens' rows.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from etude.errors import UserError, one_line
from etude.files import read_json, sha256_files
from etude.lineage.record import FileDigest
from etude.lineage.weight_files import INDEX, SINGLE, indexed_files, read_header

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    import torch

    from etude.progress import Reporter


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model's folder, after checking that each is there and whole."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model: config.json is missing; give a Hugging Face model folder")
    files = indexed_files(folder) or [file for file in (folder / SINGLE,) if file.is_file()]
    if not files and any(folder.glob("*.bin")):
        raise UserError(f"{folder} has pickled weights (*.bin), which can run code; convert them to safetensors first")
    if not files:
        raise UserError(f"{folder} has a config.json but no weights ({SINGLE} or {INDEX})")
    for file in files:
        read_header(file)
    return files


def digest_files(files: Iterable[Path], folder: Path, reporter: Reporter, label: str) -> dict[str, FileDigest]:
    """Return the digests of files by their path inside `folder`, with a progress bar."""
    listed = list(files)
    with reporter.task(label, sum(file.stat().st_size for file in listed), "B") as task:
        digests = sha256_files(listed, task.advance)
    return {
        str(file.relative_to(folder)): FileDigest(sha256=digest, bytes=file.stat().st_size)
        for file, digest in digests.items()
    }


COMPUTED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")  # old checkpoints hold what is computed anyway
TOKENISER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
DeviceWish = Literal["auto", "cpu", "cuda"]


def choose_device(wish: DeviceWish) -> torch.device:
    """Return the device to work on; `auto` takes a GPU where there is one."""
    import torch

    if wish == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda', but torch sees no GPU here; use 'cpu' or 'auto'")
    return torch.device("cuda" if wish != "cpu" and torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: bf16 on a GPU, float32 on a CPU, where bf16 is slower and less exact."""
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_model(folder: Path, device: torch.device, dtype: torch.dtype | None = None, config: Any = None) -> Any:
    """Return the model in evaluation mode, with another config than its own if one is given; on `meta`, without its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    weight_files(folder)
    quiet()
    dtype = dtype or default_dtype(device)
    try:
        config = config or AutoConfig.from_pretrained(folder, trust_remote_code=False)
        packing = _packing(folder, config)
        if device.type == "meta":
            with device:
                return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True, trust_remote_code=False,
            **({"device_map": {"": device}} if device.type != "cpu" else {}), **({"quantization_config": packing} if packing else {}),
        )  # fmt: skip
    except Exception as error:
        if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError, UserError)):
            raise
        refuse_multimodal(folder)
        raise UserError(f"{folder} cannot be loaded: {one_line(error)}") from None
    lacking = sorted(info["missing_keys"]) + [str(entry[0]) for entry in info.get("mismatched_keys", [])]
    if lacking:
        raise UserError(f"{folder}: its weights lack {len(lacking)} tensors of its config, such as {lacking[0]}")
    if unknown := sorted(name for name in info["unexpected_keys"] if not name.endswith(COMPUTED)):
        what = f"{folder}: {type(model).__name__} has no place for {len(unknown)} of its tensors, such as {unknown[0]}"
        raise UserError(f"{what}, and would lose them; correct config.json, or take them out of the weights")
    if packing:
        model._weight_conversions = None  # noqa: SLF001 - it would quantise again what is saved, or fail to
        exact = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]  # noqa: SLF001
        for name, weight in model.named_parameters():  # some come in another dtype than was asked for
            if not any(part in name for part in exact):
                weight.data = weight.data.to(dtype)
    return model.eval()


PACKINGS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}  # the classes of transformers


def _packing(folder: Path, config: Any) -> Any:
    """Return how the weights of a quantised model are dequantised; refuse a quantisation that cannot be."""
    given = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
    if (method := getattr(method, "value", method)) not in PACKINGS:
        known = ", ".join(PACKINGS)
        raise UserError(
            f"{folder} is quantised by {method!r}, which cannot be trained ({known} can); take its bf16 weights"
        )
    import transformers

    return getattr(transformers, PACKINGS[method])(dequantize=True)


def refuse_multimodal(folder: Path) -> None:
    """Say of a model that transformers does not load as a causal language model what to do, if it has a vision or audio part."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return  # what else is wrong with it, the caller says
    parts = [
        name for name in ("vision_config", "audio_config", "text_config") if isinstance(config, dict) and name in config
    ]
    if parts:
        advice = "take its text-only release, or save its language model as a checkpoint of its own"
        raise UserError(
            f"{folder} is multimodal ({parts[0]} in config.json), and Etude loads text models; {advice}"
        ) from None


def saved_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of the weights in a model's folder: that of its first tensor; of a quantised one bf16."""
    import torch
    from safetensors import safe_open

    with safe_open(weight_files(folder)[0], framework="pt") as tensors:
        dtype: torch.dtype = tensors.get_tensor(next(iter(tensors.keys()))).dtype
    quantised = "quantization_config" in read_json(folder / "config.json")
    return torch.bfloat16 if quantised else dtype


def load_tokeniser(folder: Path) -> Any:
    """Return the tokeniser of a model's folder."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENISER_FILES):
        raise UserError(f"{folder} has no tokeniser ({TOKENISER_FILES[0]}); copy the base's files next to the weights")
    quiet()
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - as above
        raise UserError(f"{folder}: its tokeniser cannot be loaded: {one_line(error)}") from None


def quiet() -> None:
    """Keep transformers' own bars and remarks out of our output; what matters we check and say ourselves."""
    import transformers

    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()


ALIKE = 0.9995  # cosine; sprout's are above 0.9997; SmolLM2 tells `<|im_start|>` and `<|im_end|>` apart at 0.9904, and must keep them
SMALL = 0.01  # of the usual norm: rows that were never drawn at all


def alike(rows: torch.Tensor, special: Collection[int]) -> list[int]:
    """Return the special tokens whose row is nearly that of another special token, or nearly nothing."""
    ids = sorted(special)
    own = rows[ids].float()
    norms = own.norm(dim=1)
    near = (own @ own.T).fill_diagonal_(-1.0) > ALIKE * (norms[:, None] * norms).clamp_min(1e-12)
    small = norms < SMALL * rows.float().norm(dim=1).median()
    return [token for token, is_alike in zip(ids, (near.any(dim=1) | small).tolist(), strict=True) if is_alike]


def tell_apart(
    model: Any, special: Collection[int], wanted: Collection[int], seed: int, *, draw: bool = True
) -> list[int]:
    """Draw anew the rows, of input and output, of the wanted special tokens that the model cannot tell apart; return which."""
    import torch

    matrices = {id(each.weight): each.weight for each in (model.get_input_embeddings(), model.get_output_embeddings())
                if not each.weight.is_meta}  # another rank has them  # fmt: skip
    redrawn: set[int] = set()
    for weight in matrices.values():  # one matrix where input and output share it
        chosen = [token for token in alike(weight, special) if token in wanted]
        redrawn.update(chosen)
        if chosen and draw:
            others = torch.ones(len(weight), dtype=torch.bool)
            others[sorted(special)] = False
            learnt = weight.detach()[others].float()
            noise = torch.randn(len(chosen), weight.shape[1], generator=torch.Generator().manual_seed(seed))
            noise = noise.to(weight.device)
            with torch.no_grad():
                weight[chosen] = (learnt.mean(dim=0) + learnt.std(dim=0) * noise).to(weight.dtype)
    return sorted(redrawn)
