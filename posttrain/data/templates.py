"""Chat templates a recipe can name. Each marks the assistant's tokens with `{% generation %}`."""

from __future__ import annotations

# Role markers are special tokens; a turn of the assistant ends with the end-of-sequence token.
TAGGED = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '<|assistant|>' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{%- else -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

# Plain text alone, for tokenizers without role tokens. A newline at the start of a solution would merge with the prompt's last.
SIMPLE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ 'Assistant:\n' }}{% generation %}{{ message['content'].lstrip() + eos_token }}{% endgeneration %}{{ '\n\n' }}"
    "{%- elif message['role'] == 'system' -%}"
    "{{ message['content'] + '\n\n' }}"
    "{%- else -%}"
    "{{ 'User:\n' + message['content'] + '\n\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant:\n' }}{%- endif -%}"
)

CHATML = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '<|im_start|>assistant\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{%- else -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

# name -> (template, tokens that must be single tokens of the vocabulary)
BUILTIN: dict[str, tuple[str, tuple[str, ...]]] = {
    "simple": (SIMPLE, ()),
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>")),
    "tagged": (TAGGED, ("<|user|>", "<|assistant|>")),
}
