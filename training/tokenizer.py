"""The tokenizer: byte-level BPE with DeepSeek's special tokens and chat template."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
# Their position is their token id: BOS is 0, EOS is 1.
SPECIAL_TOKENS = (BOS, EOS, PAD, USER, ASSISTANT, "<think>", "</think>")
# Visible in decoded text, so that a reader sees the chain of thought.
VISIBLE_TOKENS = ("<think>", "</think>")

# vLLM serves V3.2 with its own encoder (tokenizers/deepseek_v32_encoding.py) and never
# reads a template; this one gives the same strings. A user's turn opens the reply:
# with <think> if it is the last one and thinking is asked for, else with </think>.
CHAT_TEMPLATE = (
    "{%- set thinks = thinking | default(enable_thinking | default(false)) -%}"
    "{%- set turns = namespace(last_user=-1) -%}"
    "{%- for message in messages -%}{%- if message['role'] == 'user' -%}"
    "{%- set turns.last_user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{- message['content'] -}}"
    "{%- elif message['role'] == 'user' -%}"
    "{{- '<｜User｜>' + message['content'] + '<｜Assistant｜>' -}}"
    "{%- if thinks and loop.index0 == turns.last_user -%}{{- '<think>' -}}"
    "{%- else -%}{{- '</think>' -}}{%- endif -%}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{%- if thinks and loop.index0 > turns.last_user -%}"
    "{{- (message['reasoning'] or '') + '</think>' -}}{%- endif -%}"
    "{{- message['content'] + eos_token -}}"
    "{%- endif -%}{%- endfor -%}"
)


@dataclass(frozen=True)
class Turn:
    """One question and its reply; reasoning is only seen in thinking mode."""

    question: str
    answer: str
    reasoning: str = ""


def prompt(question: str, *, thinking: bool = False) -> str:
    """Write one question as vLLM does, ready for the model to reply."""
    return BOS + _opening(question, thinking)


def conversation(turns: Sequence[Turn], *, thinking: bool = False) -> str:
    """Write a whole chat; in thinking mode only the last turn keeps its reasoning."""
    *earlier, last = turns
    texts = [_opening(turn.question) + turn.answer + EOS for turn in earlier]
    thought = last.reasoning + "</think>" if thinking else ""
    texts.append(_opening(last.question, thinking) + thought + last.answer + EOS)
    return BOS + "".join(texts)


def _opening(question: str, thinking: bool = False) -> str:
    return USER + question + ASSISTANT + ("<think>" if thinking else "</think>")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Fit BPE merges; every digit stays its own token, so that sums are learnable."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    markers = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    plain = (markers.sub("\n", text) for text in texts)
    tokenizer.train_from_iterator(plain, trainer)
    # Plain completions start with BOS, as DeepSeek's own tokenizer has it.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    spelled = json.loads(tokenizer.to_str())
    for token in spelled["added_tokens"]:
        token["special"] = token["content"] not in VISIBLE_TOKENS
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": max_length,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write(folder / "tokenizer.json", json.dumps(spelled, ensure_ascii=False, indent=1))
    _write(folder / "tokenizer_config.json", json.dumps(settings, indent=2))
    _write(folder / "chat_template.jinja", CHAT_TEMPLATE)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
