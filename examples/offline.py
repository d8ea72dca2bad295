"""`LLM.generate` with the experts in local duck processes.

    python examples/offline.py [MODEL]

Duck is on because `additional_config` has a `duck` block; it names no endpoints, so
two ducks are started here and stopped at the end (or those of VLLM_DUCK_ENDPOINTS are
used, where that is set).
"""

import sys
from pathlib import Path

from vllm import LLM, SamplingParams

BUNDLED_MODEL = Path(__file__).parent.parent / "models" / "tiny-v32"


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(BUNDLED_MODEL)
    llm = LLM(
        model,
        max_model_len=2048,
        additional_config={"duck": {}},
    )
    chats = [
        [{"role": "user", "content": "Is 91 prime?"}],
        [{"role": "user", "content": "Sort these digits: 8, 4, 5, 7."}],
    ]
    outputs = llm.chat(
        chats,
        SamplingParams(temperature=0.0, max_tokens=200),
        chat_template_kwargs={"thinking": True},
    )
    for chat, output in zip(chats, outputs, strict=True):
        # Asked to think, the model reasons first, up to a </think>.
        reasoning, _, answer = output.outputs[0].text.partition("</think>")
        print(f"> {chat[0]['content']}\n({reasoning})\n{answer}\n")


if __name__ == "__main__":
    main()
