"""The chat template writes exactly what vLLM's own V3.2 encoder writes."""

from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from training.tokenizer import BOS, CHAT_TEMPLATE, EOS, Turn, conversation, prompt

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "What is 2 + 3?"}
ANSWERED = {"role": "assistant", "content": "5.", "reasoning": "2 + 3 = 5."}
AGAIN = {"role": "user", "content": "Is 5 prime?"}
CHATS = ([ASKED], [SYSTEM, ASKED], [ASKED, ANSWERED], [SYSTEM, ASKED, ANSWERED, AGAIN])


def _render(messages: list[dict[str, str]], **options: Any) -> str:
    # The same environment as transformers' apply_chat_template.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(CHAT_TEMPLATE)
    return template.render(messages=messages, bos_token=BOS, eos_token=EOS, **options)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("thinking", [False, True])
def test_template_equals_vllms_encoder(
    messages: list[dict[str, str]], thinking: bool
) -> None:
    encoding = pytest.importorskip("vllm.tokenizers.deepseek_v32_encoding")
    mode = "thinking" if thinking else "chat"
    expected = encoding.encode_messages(messages, thinking_mode=mode)
    assert _render(messages, thinking=thinking) == expected
    assert _render(messages, enable_thinking=thinking) == expected


@pytest.mark.parametrize("thinking", [False, True])
def test_training_writes_what_the_template_writes(thinking: bool) -> None:
    turn = Turn(ASKED["content"], ANSWERED["content"], ANSWERED["reasoning"])
    whole = conversation([turn], thinking=thinking)
    assert whole == _render([ASKED, ANSWERED], thinking=thinking)
    opening = prompt(ASKED["content"], thinking=thinking)
    assert opening == _render([ASKED], thinking=thinking)
    assert whole.startswith(opening)


def test_without_a_wish_the_template_does_not_think() -> None:
    assert _render([ASKED]).endswith("</think>")
