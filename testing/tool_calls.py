"""A chat whose answer is a tool call, asked as a whole and as a stream.

The bundled model was trained on no tools: the grammar of vLLM's structural tag forces
the call, and the model chooses the digits.
"""

from examples.tool_call import QUESTION, TOOLS

# DeepSeek-V3.2's own checkpoint: no chat template, vLLM encodes by itself.
CHAT_FLAGS = (
    *("--reasoning-parser", "deepseek_v3"),
    *("--tool-call-parser", "deepseek_v32", "--enable-auto-tool-choice"),
)

# Of the bundled model, greedy, with and without drafts.
CALL = ("sort_digits", '{"digits": [1, 3, 4, 3, 4, 5]}', "tool_calls")


def _request():
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 600,
        "temperature": 0,
        # The grammar allows any whitespace, and the model has a taste for it.
        "frequency_penalty": 2.0,
    }


def call_at_once(client):
    """Name and arguments of the one call, and why the answer ended."""
    (choice,) = client.chat.completions.create(**_request()).choices
    (call,) = choice.message.tool_calls
    return call.function.name, call.function.arguments, choice.finish_reason


def call_in_pieces(client):
    name, arguments, reason = "", "", None
    for event in client.chat.completions.create(**_request(), stream=True):
        (choice,) = event.choices
        for piece in choice.delta.tool_calls or ():
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
        reason = choice.finish_reason or reason
    return name, arguments, reason
