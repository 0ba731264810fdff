"""Makes `tests/fixtures/tokenizers/`: tiny tokenizers of each kind, and what transformers does with them.

Needs the `oracle` extra (transformers, and protobuf for its reading of sentencepiece models):

    python scripts/make_tokenizer_fixtures.py

Training is deterministic, so running it again changes nothing unless a library changed. What transformers answers is
the truth for the tests, but for text that begins with a space in front of a sentencepiece model: there transformers 5
merges the prefix space with the text's own, and sentencepiece itself, which the models were trained with, does not;
and for text that spells a byte piece, "<0x0A>", which its unigram takes for the byte. Those few answers come from
sentencepiece, and all of `legacy` from the sentencepiece backend of transformers, for the same reason.
"""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

DEMO = Path(__file__).resolve().parent.parent / "jaxserve" / "demo_model"
ROOT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "tokenizers"

CORPUS = """The quick brown fox jumps over the lazy dog. A small model answers a question about the weather.
Once upon a time there was a little girl who lived near the sea; she loved to count shells: 1, 2, 3, 42, 1234.
"What is the capital of France?" she asked. It's Paris, they'll say, and we've known it since 1999.
def add(a, b):
    return a + b
{"name": "Ann", "age": 31, "tags": ["x", "y"]}
Der schnelle braune Fuchs springt über den faulen Hund. Où est la bibliothèque ? Señor, ¿cómo está usted?
Быстрая лиса прыгает. 素早い茶色の狐。 שלום עולם. مرحبا بالعالم. สวัสดีชาวโลก
user: hello  assistant: hi there, how are you   today? system: be brief.
"""

TEXTS = [
    "", " ", "  ", "\n", "\n\n \t\n", "a", "Hello", " Hello", "  Hello", "Hello ", "Hello  world  ", "hello\nworld\n",
    "the quick brown fox", "The capital of France is Paris.", "don't we've THEY'LL", "1234567890", "3.14159, -2e10",
    "\tdef f(x):\n\t\treturn x  # tab", "über cómo où", "e\u0301 vs \u00e9", "\u1e9b\u0323", "שלום مرحبا", "สวัสดี",
    "素早い茶色の狐 漢字", "한국어", "👩\u200d👩\u200d👧\u200d👦 family", "🏳️\u200d🌈🇫🇷👍🏽", "a\u200db\u200cc\ufeffd",
    "\u202ertl\u202c", "zero\x00byte", "\x01\x7f\x80", "\u2581under\u2581score", "a\u00a0b\u3000c", "\r\n windows \r\n",
    "\U0001d56c\U0001d593\U0001d588\U0001d58e\U0001d58a\U0001d593\U0001d599",
    "Z͑ͫ̓ͪ̂a̷l̴g̶o̸", "\ufffd real replacement \ufffd", "x" * 70, "ab" * 40, "<0x0A>", "<0xE2>",
    "{BOS}", "{EOS}", "{BOS}Hello", "Hello{EOS}", "Hello {EOS} world", "{BOS}{BOS}{EOS}", "{TAG}user\nHi{EOS}\n",
    "{TAG}", "{TAG} {TAG}", "a{TAG}b", "a {TAG} b", "half {TAG", "x{EOS}\n\n{TAG}é👍", "{TAG}\u2581x", "<{TAG}>",
    "{PLAIN}x{PLAIN}", "a  <mask> \n b", "<mask>", "wort words worte xwort (wort) wort",
    "{BOS} two  spaces", "{TAG}  lead", "trail  {TAG}", "{EOS}{TAG}{BOS}mixed{PLAIN} 素{EOS}",
]  # fmt: skip


def spm_model(model_type: str, **options: Any) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines() * 4), model_writer=out, model_type=model_type, vocab_size=480,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        character_coverage=0.98, allow_whitespace_only_pieces=True, hard_vocab_limit=False, minloglevel=2,
        num_threads=1, **options,
    )  # fmt: skip
    return out.getvalue()


def write(directory: Path, name: str, content: Any) -> None:
    text = json.dumps(content, ensure_ascii=True, indent=1, sort_keys=False)
    text = re.sub(r"\[\n[\d,\s]+\]", lambda ids: " ".join(ids[0].split()), text)  # a list of ids takes one line
    (directory / name).write_text(text + "\n", encoding="utf-8")


def added(content: str, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **plain, **flags, "special": special}


def make_spm_bpe(directory: Path, *, legacy: bool) -> dict[str, str]:
    """Llama 2: dummy prefix on, tags behind the end of the vocabulary."""
    model = spm_model("bpe")
    (directory / "tokenizer.model").write_bytes(model)
    size = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    write(directory, "tokenizer_config.json", {
        "tokenizer_class": "LlamaTokenizer", "legacy": legacy, "add_bos_token": True, "add_eos_token": False,
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            "0": added("<unk>"), "1": added("<s>"), "2": added("</s>"),
            str(size): added("<|tag|>"), str(size + 1): added("<plain>", special=False),
            str(size + 2): added("<mask>", lstrip=True, rstrip=True),
            str(size + 3): added("wort", special=False, single_word=not legacy),
        },
    })  # fmt: skip
    return {"BOS": "<s>", "EOS": "</s>", "TAG": "<|tag|>", "PLAIN": "<plain>"}


def make_spm_unigram(directory: Path) -> dict[str, str]:
    """No dummy prefix, tags inside the model as control and user-defined symbols; nothing but the model says so."""
    model = spm_model("unigram", add_dummy_prefix=False, control_symbols=["<|tag|>"], user_defined_symbols=["<plain>"])
    (directory / "tokenizer.model").write_bytes(model)
    write(directory, "tokenizer_config.json", {
        "tokenizer_class": "TokenizersBackend", "add_bos_token": False, "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "clean_up_tokenization_spaces": False,
    })  # fmt: skip
    return {"BOS": "<s>", "EOS": "</s>", "TAG": "<|tag|>", "PLAIN": "<plain>"}


def train_byte_level(backend: tokenizers.Tokenizer, specials: list[str]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=560, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    backend.train_from_iterator(CORPUS.splitlines() * 4, trainer)
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in specials])


def byte_level(pattern: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    backend.decoder = decoders.ByteLevel()
    return backend


def make_llama3(directory: Path) -> dict[str, str]:
    """Byte-level BPE, digits in threes, the post processor adds the beginning token."""
    backend = byte_level(r"'s|'t|'re|'ve|'ll| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    train_byte_level(backend, ["<|begin|>", "<|end|>", "<|header|>", "<|eot|>"])
    begin = backend.token_to_id("<|begin|>")
    template = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|>:1 $B:1", special_tokens=[("<|begin|>", begin)]
    )
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    backend.enable_truncation(max_length=20)  # a trap: real files carry such leftovers, and serving must not obey
    backend.save(str(directory / "tokenizer.json"))
    write(directory, "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|eot|>",
        "clean_up_tokenization_spaces": False,
    })  # fmt: skip
    return {"BOS": "<|begin|>", "EOS": "<|eot|>", "TAG": "<|header|>", "PLAIN": "plain"}


def make_qwen(directory: Path) -> dict[str, str]:
    """Byte-level BPE, NFC, single digits, no beginning token, one added token that is not special."""
    words = r"(?i:'s|'t|'ll|'ve)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    backend = byte_level(words + r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    backend.normalizer = normalizers.NFC()
    train_byte_level(backend, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([tokenizers.AddedToken("<tool_call>", special=False, normalized=False)])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.save(str(directory / "tokenizer.json"))
    write(directory, "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "pad_token": "<|endoftext|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False},
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    })  # fmt: skip
    write(directory, "config.json", {"bos_token_id": 3, "eos_token_id": 4})  # another trap: must not be used
    return {"BOS": "<|endoftext|>", "EOS": "<|im_end|>", "TAG": "<|im_start|>", "PLAIN": "<tool_call>"}


def make_metaspace(directory: Path) -> dict[str, str]:
    """Llama 2 as tokenizer.json: the normaliser writes the spaces; ids of bos and eos are in config.json only."""
    model = sentencepiece.SentencePieceProcessor(model_proto=spm_model("bpe"))
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    merges = transformers.tokenization_utils_base.generate_merges(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    spaces, strip = decoders.Replace("\u2581", " "), decoders.Strip(content=" ", left=1, right=0)
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    names = ["<unk>", "<s>", "</s>", "<|tag|>"]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in names])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(directory / "tokenizer.json"))
    write(directory, "config.json", {"bos_token_id": 1, "eos_token_id": [2, 7]})
    return {"BOS": "<s>", "EOS": "</s>", "TAG": "<|tag|>", "PLAIN": "plain"}


def load_oracle(name: str, directory: Path) -> Any:
    if name == "metaspace":  # no tokenizer_config.json there; the names are what config.json's ids say
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **names)
    kind = "LlamaTokenizer" if name.startswith("spm_bpe") else "PreTrainedTokenizerFast"
    return getattr(transformers, kind).from_pretrained(directory)


def answers(name: str, directory: Path, names: dict[str, str]) -> dict[str, Any]:
    oracle = load_oracle(name, directory)
    oracle.backend_tokenizer.no_truncation()
    model_path = directory / "tokenizer.model"
    raw = sentencepiece.SentencePieceProcessor(model_file=str(model_path)) if model_path.is_file() else None
    slow = None
    if name == "spm_bpe_legacy":
        options = json.loads((directory / "tokenizer_config.json").read_text())
        tokens = {int(i): tokenizers.AddedToken(**flags) for i, flags in options.pop("added_tokens_decoder").items()}
        slow = SentencePieceBackend(vocab_file=str(model_path), added_tokens_decoder=tokens, **options)
    cases = []
    for pattern in TEXTS:
        text = pattern
        for role, token in names.items():
            text = text.replace("{" + role + "}", token)
        plain = oracle.encode(text, add_special_tokens=False)
        full = oracle.encode(text)
        source = "transformers"
        if slow is not None:
            plain, source = slow.encode(text, add_special_tokens=False), "transformers, sentencepiece backend"
            full = oracle.encode("") + plain
        elif raw is not None and text == pattern and (text.startswith((" ", "\u2581")) or "<0x" in text):
            plain, source = raw.encode(text), "sentencepiece"
            full = oracle.encode("") + plain
        cases.append({
            "text": text, "ids": full, "ids_plain": plain, "source": source,
            "decoded": oracle.decode(full, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            "decoded_full": oracle.decode(full, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        })  # fmt: skip
    made_with = {m.__name__: m.__version__ for m in (transformers, tokenizers, sentencepiece)}
    return {
        "made_with": made_with,
        "tokens": names,
        "vocab_size": len(oracle),
        "special_ids": [i for i, token in oracle.added_tokens_decoder.items() if token.special],
        "bos_token_id": oracle.bos_token_id,
        "eos_token_id": oracle.eos_token_id,
        "cases": cases,
    }


# Written for these tests in the manner of the named families.
CHAT_TEMPLATES = {
    "llama3": """{{- bos_token }}
{%- if tools is not none %}
    {{- '<|header|>tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
        {{- '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant\\n\\n' }}
{%- endif %}
""",
    "qwen": """{%- if messages[0].role != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
{% endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- generation %}{{- message.content }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ call.function.arguments | tojson ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}
{#- a comment #}{{ ns.count }}
""",
    "mistral": """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate user/assistant') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' -}}
    {% else %}
        {{- ' ' + message['content'] + eos_token -}}
    {% endif %}
{% endfor %}""",
}

TURNS = [{"role": "user", "content": " Hi <b>\"x\"</b> & é👍 "}, {"role": "assistant", "content": "Hello\n"},
         {"role": "user", "content": "again {{ 7 * 7 }} {% raw %}"}]  # fmt: skip
CALL = [{"role": "user", "content": "sum?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}]},
        {"role": "skip", "content": "unseen"}, {"role": "tool", "content": "3"}]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & c 'd'", "parameters": {}}}]

# An agent's conversation: parameters, texts beside calls, arguments as text and as an object, two calls in one turn.
CITY = {"type": "string", "description": "in any script", "enum": ["Zürich", "東京", 'a "b"']}
SCHEMA = {"type": "object", "properties": {"city": CITY, "days": {"type": "integer"}}, "required": ["city"]}
AGENT_TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": " Says <how> it is. ", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = ('{"city": "東京"}', {"city": "Zürich", "days": 2, "x": [None, True, 0.5]}, {})
CALLS = [
    {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
    for number, (name, arguments) in enumerate(zip(("get_weather", "get_weather", "now"), ARGUMENTS, strict=True))
]
AGENT = [
    {"role": "system", "content": "You have tools."},
    {"role": "user", "content": "Weather in 東京 and Zürich?"},
    {"role": "assistant", "content": "Let me see.\n", "tool_calls": CALLS[:2]},
    {"role": "tool", "tool_call_id": "call_0", "content": '{"sky": "☀", "degrees": 31}'},
    {"role": "tool", "tool_call_id": "call_1", "content": " <rain> & wind\n"},
    {"role": "assistant", "content": None, "tool_calls": CALLS[2:]},
    {"role": "tool", "tool_call_id": "call_2", "content": ""},
    {"role": "assistant", "content": "It is noon."},
    {"role": "user", "content": "Thanks 👍"},
]


def chat_answers() -> list[dict[str, Any]]:
    cases = []
    for name, kind in (("llama3", "llama3"), ("qwen", "qwen"), ("mistral", "spm_bpe")):
        oracle = load_oracle(kind, ROOT / kind)
        oracle.backend_tokenizer.no_truncation()
        for messages in (TURNS[:1], TURNS) if name == "mistral" else (TURNS, CALL):
            for generate in (True, False):
                for tools in (None, TOOLS):
                    options = {"add_generation_prompt": generate, "tools": tools, "enable_thinking": False}
                    arguments = {"chat_template": CHAT_TEMPLATES[name], **options}
                    text = oracle.apply_chat_template(messages, tokenize=False, **arguments)
                    ids = oracle.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
                    cases.append({"template": name, "tokenizer": kind, "messages": messages, **options, "text": text,
                                  "ids": ids})  # fmt: skip
    return cases


def demo_answers() -> dict[str, Any]:
    """What `AutoTokenizer` makes of the demo model's own files: ids, and chats with and without tools."""
    oracle = transformers.AutoTokenizer.from_pretrained(DEMO)
    names = {"BOS": "<s>", "EOS": "<|end|>", "TAG": "<|user|>", "PLAIN": "<spare1>"}
    cases = []
    for text in (*TEXTS, "What is 1+2?", '{"name": "Ada", "age": 36}', "Here is a list: flag:93, doll:95."):
        for role, token in names.items():
            text = text.replace("{" + role + "}", token)
        ids = oracle.encode(text)
        decoded = oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        cases.append({"text": text, "ids": ids, "decoded": decoded})
    chats = []
    developer = {"role": "developer", "content": " Be brief. "}
    for messages in (TURNS, [developer, *CALL[:2], CALL[3], *CALL[3:]], AGENT):
        for tools in (None, AGENT_TOOLS if messages is AGENT else TOOLS):
            options: dict[str, Any] = {"tools": tools, "add_generation_prompt": tools is None}
            text = oracle.apply_chat_template(messages, tokenize=False, **options)
            ids = oracle.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
            chats.append({"messages": messages, **options, "text": text, "ids": ids})
    made_with = {m.__name__: m.__version__ for m in (transformers, tokenizers)}
    return {"made_with": made_with, "cases": cases, "chats": chats}


def main() -> None:
    makers = {
        "spm_bpe": lambda d: make_spm_bpe(d, legacy=False), "spm_bpe_legacy": lambda d: make_spm_bpe(d, legacy=True),
        "spm_unigram": make_spm_unigram, "llama3": make_llama3, "qwen": make_qwen, "metaspace": make_metaspace,
    }  # fmt: skip
    shutil.rmtree(ROOT, ignore_errors=True)
    for name, make in makers.items():
        directory = ROOT / name
        directory.mkdir(parents=True)
        names = make(directory)
        write(directory, "expected.json", answers(name, directory, names))
        print(name, sum(f.stat().st_size for f in directory.iterdir()), "bytes")
    write(ROOT, "demo.json", demo_answers())
    write(ROOT, "chat.json", {"templates": CHAT_TEMPLATES, "cases": chat_answers()})


if __name__ == "__main__":
    main()
