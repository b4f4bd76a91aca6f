"""Training text and tokenizer for the demo model: the standard library of CPython 3.11, 3.12 and 3.13.

    python lab/demo_model/data.py OUT MODEL_DIR STDLIB_3.13 STDLIB_3.12 STDLIB_3.11     # newest first

writes OUT/tokens.npz (uint16 token streams), MODEL_DIR/tokenizer*.json and MODEL_DIR/held_out.json. No text is kept in the
repository. Held-out and validation modules are chosen by the hash of their name, in every version at once; a training file
that shares ten lines or more with one of them, and these are a fifth of either, is dropped as well. Test files stay."""

import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from narrowgate.engine.held_out import LIST_NAME, module_path, read_module

VOCAB = 4096
END = "<|endoftext|>"
MODULUS, HELD_OUT, VALIDATION = 28, 0, 1  # int(sha256(name)) % 28
SMALLEST, LARGEST = 2_000, 60_000  # bytes, in each version
# Parts of the library that some distributions leave out or change, that hold tables or prose, or that are tests.
# fmt: off
NOT_ELIGIBLE = {
    "test", "idlelib", "lib2to3", "tkinter", "turtledemo", "turtle", "distutils", "ensurepip", "venv", "pydoc_data",
    "encodings", "site-packages", "this", "antigravity", "lib-dynload", "ctypes", "curses", "dbm", "msilib", "sqlite3",
}
# fmt: on
NOVEL = 0.3  # an older version of a file stays only if this share of its lines is new
REPEATED = 0.2
# Newline runs, indentation, words with one space or dot or underscores before them, numbers, punctuation, other space.
PIECES = r"[\r\n]+|(?<![^\r\n])[ \t]+|[ .]?_*\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+(?=[ ]\S)|\s+"


def module_names(stdlib: Path) -> set[str]:
    """Dotted names of the eligible public modules."""
    names = set()
    for path in stdlib.rglob("*.py"):
        parts = path.relative_to(stdlib).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        hidden = any(part.startswith("_") or part in ("test", "tests") for part in parts)
        if not parts or hidden or parts[0] in NOT_ELIGIBLE or parts[0].startswith("config-"):
            continue
        if SMALLEST <= path.stat().st_size <= LARGEST:
            names.add(".".join(parts))
    return names


def chosen(stdlibs: list[Path], residue: int) -> list[str]:
    common = set.intersection(*(module_names(root) for root in stdlibs))
    return sorted(n for n in common if int(hashlib.sha256(n.encode()).hexdigest(), 16) % MODULUS == residue)


def lines_of(text: str) -> list[str]:
    """The lines that say something: 20 characters or more, stripped."""
    return [line for line in map(str.strip, text.split("\n")) if len(line) >= 20]


def repeats(lines: set[str], secret: list[set[str]]) -> bool:
    """Whether a file with these lines is nearly a copy of (a part of) one of the secret files."""
    return any(len(lines & other) >= max(10, REPEATED * min(len(lines), len(other))) for other in secret)


def training_files(stdlibs: list[Path], secret_names: list[str]) -> list[tuple[str, str]]:
    """(relative name, text) of every file to train on, near-copies dropped."""
    secret_paths = {module_path(name, root) for root in stdlibs for name in secret_names}
    secret = [set(lines_of(read_module(path))) for path in sorted(secret_paths)]
    seen: set[str] = set()
    kept = []
    for root in stdlibs:
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if path in secret_paths or re.search(r"site-packages|^config-|_sysconfigdata", name):
                continue
            try:
                text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:  # tests of other encodings
                continue
            lines = lines_of(text)
            if not lines or "Python Character Mapping Codec" in text or max(map(len, lines)) > 2000:
                continue  # generated tables
            if sum(line not in seen for line in lines) < NOVEL * len(lines):
                continue
            if repeats(set(lines), secret):
                print(f"dropped: {root.name}/{name} repeats a held-out or validation module")
                continue
            seen.update(lines)
            kept.append((name, text))
    return kept


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE. Every text is encoded with END before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int = 2048) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def is_library(name: str) -> bool:
    return not re.search(r"(^|/)(tests?|idle_test)/|^pydoc_data", name)


def main(out: Path, model: Path, stdlibs: list[Path]) -> None:
    held_out, validation = chosen(stdlibs, HELD_OUT), chosen(stdlibs, VALIDATION)
    files = training_files(stdlibs, held_out + validation)
    tokenizer = train_tokenizer([text for _, text in files])
    save_tokenizer(tokenizer, model)
    rule = f"int(sha256(name)) % {MODULUS} == {HELD_OUT}, among public pure-Python modules of {SMALLEST} to {LARGEST} bytes"
    note = {"modules": held_out, "rule": rule + ", present in CPython 3.11, 3.12 and 3.13; left out of training in all three"}
    (model / LIST_NAME).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")

    def ids(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text).ids, dtype=np.uint16)

    groups = {"library": [t for n, t in files if is_library(n)], "tests": [t for n, t in files if not is_library(n)]}
    arrays = {}
    for group, texts in groups.items():
        encoded = [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(texts)]
        arrays[group] = np.concatenate(encoded)
        arrays[group + "_lengths"] = np.array([len(e) for e in encoded])
        size = sum(len(t.encode()) for t in texts)
        print(
            f"{group}: {len(texts)} files, {size} bytes, {len(arrays[group])} tokens, {size / len(arrays[group]):.3f} bytes/token"
        )
    for group, names in (("validation", validation), ("held_out", held_out)):
        texts = [read_module(module_path(name, stdlibs[0])) for name in names]
        encoded = [ids(t) for t in texts]
        arrays[group], arrays[group + "_lengths"] = np.concatenate(encoded), np.array([len(e) for e in encoded])
        arrays[group + "_bytes"] = np.array([len(t.encode()) for t in texts])
        size = arrays[group + "_bytes"].sum()
        print(f"{group}: {size} bytes, {size / len(arrays[group]):.3f} bytes/token: {' '.join(names)}")
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "tokens.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(p) for p in sys.argv[3:]])
