"""Tiny tokenizers made on the spot: no download, every decoder kind that is served."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers


def make_byte_level() -> Tokenizer:
    """Shaped like GPT-NeoX's: NFC, ByteLevel, end of text at id 0, runs of spaces as added tokens; and chat marks."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, the end of text 안녕하세요"] * 4, trainer)
    backend.add_tokens([AddedToken("   ", normalized=True), AddedToken("  ", normalized=True)])
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=64)
    return backend


def make_byte_fallback() -> Tokenizer:
    """Shaped like Llama's: a word-start mark and a token for each byte."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [*(f"<0x{value:02X}>" for value in range(256)), "\u2581", "h", "i", "\u2581h", "\u2581hi"]:
        vocabulary[token] = len(vocabulary)
    merges = [("\u2581", "h"), ("\u2581h", "i")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def make_unigram() -> Tokenizer:
    """A model that scores "</s>" itself, so that leaving added tokens alone does not keep it out of user text."""
    pieces = [("<unk>", -20.0), ("</s>", 0.0), ("\u2581", -2.0), *((f"<0x{value:02X}>", -9.0) for value in range(256))]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    backend.add_special_tokens(["<unk>", "</s>"])
    return backend


SPLITS = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""How published tokenizers of Qwen split a text, by the name that converters give it."""


def make_qwen(pre: str = "qwen35") -> Tokenizer:
    """Shaped like Qwen's: NFC, their pattern, added tokens behind the vocabulary, of which some look special and are not."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    lines = [
        "hello world, it's THE end of text!!\n\n",
        "क्षि का नाम है, สวัสดีครับ",
        "x = f(y);\n    return 12345 - e\u0301",
    ]
    backend.train_from_iterator(lines * 4, trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    plain = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<think>", "</think>", "@@plain@@"]
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return backend
