"""A tool call: the model asks for a function, this script runs it and sends the result.

In one terminal:
    vllm serve MODEL --additional-config '{"duck": {}}' \\
        --speculative-config '{"method": "duck_mtp1"}' \\
        --reasoning-parser deepseek_v3 \\
        --tool-call-parser deepseek_v32 --enable-auto-tool-choice
In another:
    python examples/tool_call.py [--url http://localhost:8000/v1] [--force]

DeepSeek-V3.2 decides by itself whether it calls. The bundled model has never seen a
tool: with --force vLLM's grammar makes it call, with valid arguments of little sense.
"""

import argparse
import json
from typing import Any

from openai import OpenAI

QUESTION = "Sort these digits: 8, 4, 5, 7."
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "sort_digits",
            "description": "Sorts digits in ascending order.",
            # The arguments follow the schema, not only the call its form.
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "digits": {
                        "type": "array",
                        "items": {"type": "integer", "enum": list(range(10))},
                        "minItems": 4,
                        "maxItems": 8,
                    }
                },
                "required": ["digits"],
                "additionalProperties": False,
            },
        },
    }
]


def main() -> None:
    options = _parse_options()
    client = OpenAI(base_url=options.url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=TOOLS,
        tool_choice="required" if options.force else "auto",
        parallel_tool_calls=False,
        max_tokens=600,
        temperature=0,
    )
    message = asked.choices[0].message
    if not message.tool_calls:
        print(f"answer: {message.content}")
        return
    messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
    for call in message.tool_calls:
        result = run(call.function.name, call.function.arguments)
        print(f"call: {call.function.name}({call.function.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, max_tokens=100, temperature=0
    )
    print(f"answer: {answer.choices[0].message.content}")


def run(name: str, arguments: str) -> str:
    assert name == "sort_digits"
    return json.dumps(sorted(json.loads(arguments)["digits"]))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument(
        "--force", action="store_true", help="make the model call a tool"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
