"""The canonical form of conversations and of tool schemas, in which chat templates read them.

Rows of data, environments and clients write the same conversation in many ways: OpenAI's, ShareGPT's, with arguments as
JSON text, with fields that are null. `canonical_messages` and `canonical_tools` turn all of them into one form:

- a message is a dict with a text ``role`` and a text ``content``; fields that are null are left out
- ``reasoning_content`` holds the reasoning; `nrl.data.forms` gives it the name that the chat template reads
- a call is ``{"type": "function", "function": {"name": ..., "arguments": {...}}}``; arguments are an object, or a text
  where they are no JSON object
- ``weight`` stands only in a message of the assistant that is not trained, and is 0
- results of tools within a message of the user, as Anthropic has them, are messages of the role ``tool``
- a tool is ``{"type": "function", "function": {...}}``

Other fields stay as they are. The module imports no tensors, so environments can use it.
"""

from nrl.data.messages.canonical import (
    ROLES,
    SYSTEM_ROLES,
    TRAINED,
    are_messages,
    before_answers,
    canonical_messages,
    canonical_prompt,
    decoded_messages,
    is_chat,
)
from nrl.data.messages.content_parts import separate_results
from nrl.data.messages.reasoning import REASONING, split_content
from nrl.data.messages.tool_calls import decode_json, read_arguments
from nrl.data.messages.tool_schemas import canonical_tools

__all__ = [
    "REASONING",
    "ROLES",
    "SYSTEM_ROLES",
    "TRAINED",
    "are_messages",
    "before_answers",
    "canonical_messages",
    "canonical_prompt",
    "canonical_tools",
    "decode_json",
    "decoded_messages",
    "is_chat",
    "read_arguments",
    "separate_results",
    "split_content",
]
