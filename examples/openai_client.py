"""Talks to `vllm serve` with the OpenAI client: a completion, a chat, a stream.

In one terminal:
    vllm serve models/tiny-v32 --max-model-len 2048 --additional-config '{"duck": {}}'
In another:
    python examples/openai_client.py [http://localhost:8000/v1]
"""

import sys

from openai import OpenAI


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id

    completion = client.completions.create(
        model=model, prompt='The "if" statement', max_tokens=40, temperature=0
    )
    print(f"completion: {completion.choices[0].text!r}\n")

    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is 47 + 38?"}],
        max_tokens=200,
        temperature=0,
        extra_body={"chat_template_kwargs": {"thinking": True}},
    )
    # Behind its reasoning, which `--reasoning-parser deepseek_v3` of the server would
    # have put into a field of its own.
    print(f"chat: {chat.choices[0].message.content.partition('</think>')[2]}\n")

    print("stream: ", end="")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What does heapq.heappop do?"}],
        max_tokens=100,
        temperature=0,
        stream=True,
    )
    for event in stream:
        print(event.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
