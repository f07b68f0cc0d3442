"""Chat templates in the formats of published models, and a tokenizer for all of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.support.tokenizer_files import corpus_texts, write_bpe

CHATML = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- if tools %}{{- '<tools>' + (tools | tojson) + '</tools>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.content %}{{- m.content }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Only the answers after the last question keep their reasoning, and the last one always has some.
QWEN3 = (
    "{%- set last = namespace(user=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}"
    "{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set text = m.content if m.content is string else '' %}"
    "{%- if m.role != 'assistant' %}"
    "{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{%- else %}"
    "{%- set thought = m.reasoning_content or '' %}"
    "{%- if '</think>' in text %}"
    "{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > last.user and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- text }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nPROMPT' }}{%- endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = none %}{% set turns = messages %}"
    "{% endif %}{% for m in turns %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% set text = m['content'] %}"
    "{% if loop.first and system %}{% set text = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + text"
    " %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + text | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + text | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}"
    "{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' }}"
    "{{- (strftime_now('%d %b %Y') if false else '26 Jul 2024') + '\\n\\n' + system }}"
    "{{- '<|eot_id|>' }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{%- if m.tool_calls %}"
    "{{- '{\"name\": \"' + m.tool_calls[0].function.name + '\"}' + '<|eom_id|>' }}"
    "{%- else %}{{- m['content'] | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
    "{% endfor %}"
)
# The system message moves to the last question.
MISTRAL_MOVING = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{%- set turns = messages[1:] if system else messages %}"
    "{%- set last = (turns | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{{- bos_token }}{%- for m in turns %}{%- if m.role == 'user' %}"
    "{{- '[INST] ' }}{%- if m == last and system %}{{- system + '\\n\\n' }}{%- endif %}"
    "{{- m.content + '[/INST]' }}{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}"
    "{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}"
    "{% else %}{{ eos_token }}{% endif %}"
)
# The prompt begins the reasoning; a complete answer is rendered without it.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ '<\uff5cUser\uff5c>' + m['content'] }}"
    "{% else %}{% set text = m['content'].split('</think>')[-1] %}"
    "{{ '<\uff5cAssistant\uff5c>' + text + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}"
    "\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}"
    "\n{% elif m['role'] == 'system' %}\n{{ '<|system|>\n' + m['content'] + eos_token }}"
    "\n{% elif m['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + m['content'] + eos_token }}"
    "\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}"
    "\n{% endif %}\n{% endfor %}"
)
OLMO = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] != 'assistant' %}"
    "{{ '<|' + m['role'] + '|>\\n' + m['content'] + '\\n' }}"
    "{% else %}{{ '<|assistant|>\\n' + m['content'] + eos_token }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"
)
SPECIAL_TOKENS = (
    "<s> </s> <unk> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
    "<|eom_id|> <start_of_turn> <end_of_turn> <|user|> <|assistant|> <|system|> <|end|> "
    "<|endoftext|> <\uff5cUser\uff5c> <\uff5cAssistant\uff5c> "
    "<\uff5cend\u2581of\u2581sentence\uff5c> <SPECIAL_10> <SPECIAL_11> <SPECIAL_12> <SPECIAL_233>"
).split()


def write_chat_tokenizer(
    folder: Path, template: str | None = CHATML, eos: str = "</s>", vocab_size: int = 600
) -> Path:
    """Write a byte-level BPE with the special tokens of all templates to ``folder``."""
    from tokenizers import AddedToken, Tokenizer

    write_bpe(folder, vocab_size)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = library.get_vocab()
    # Phi-3's <|user|> is a special token, Zephyr's is plain text: both derive the same mask.
    library.add_special_tokens(
        [AddedToken(token, special=True) for token in SPECIAL_TOKENS if token not in known]
    )
    library.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": eos, "unk_token": "<unk>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_conversations(path: Path, count: int, seed: int = 0, longest: int = 3) -> Path:
    """Write ``count`` conversations of texts of the golden corpus, of one to ``longest`` turns."""
    random = np.random.default_rng(seed)
    words = " ".join(corpus_texts()[:20]).split()
    lines = []
    for _ in range(count):
        messages = []
        for _ in range(int(random.integers(1, longest + 1))):
            for role in ("user", "assistant"):
                at = int(random.integers(len(words) - 40))
                size = min(40, 1 + int(random.lognormal(0.8, 0.8)))
                content = " ".join(words[at : at + size])
                messages.append({"role": role, "content": content})
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path
