"""Which tokens a conversation has and which of them are its answer's, by template and tokenizer."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from jinja2 import TemplateError

from rlx.base import UserError
from rlx.rollout.datasets import AnswerWorkflow, end_token
from rlx.rollout.workflows import Prompts

ROW = {"question": "What is 12 + 30?"}
PLAIN = "The sum is 42."
THOUGHT = "<think>\n12 and 30\n</think>\n\nThe sum is 42."
TURNS = [
    {"role": "assistant", "content": "Which base?"},
    {"role": "user", "content": "Ten."},
    {"role": "assistant", "content": "Then 42."},
]

ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + ASK
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + ASK
)


def of(answer, ask="", end="<|im_end|>\n"):
    """A template that renders each answer as `answer`, and asks for one with `ask` behind."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"<|im_start|>assistant\n{answer}{end}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + ask + "{% endif %}"
    )


KEPT = "{{ m.content if '</think>' in m.content else '<think>\n\n</think>\n\n' ~ m.content }}"
CLOSED = "{{ m.content if '</think>' in m.content else '<think></think>' ~ m.content }}"
BEHIND = "{{ m.content.split('</think>')[-1] }}"
SPACED = (
    "{% if '</think>' in m.content %}{% set parts = m.content.split('</think>') %}<think>\n"
    "{{ parts[0].split('<think>')[-1] | trim }}\n</think>\n\n{{ parts[1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}"
)
CHANNEL = "<|channel|>final<|message|>"
END = "<|im_end|>"
# kind → template, and the text that is trained on for PLAIN and for THOUGHT; None: refused.
TEMPLATES = {
    "plain": (CHATML, PLAIN + END, THOUGHT + END),
    "marked": (MARKED, PLAIN + END, THOUGHT + END),
    "trimmed": (of("{{ m.content | trim }}"), PLAIN + END, THOUGHT + END),
    "thought in front": (of(KEPT), "<think>\n\n</think>\n\n" + PLAIN + END, THOUGHT + END),
    "asked to think": (of(KEPT, "<think>\n"), "\n</think>\n\n" + PLAIN + END,
                       "12 and 30\n</think>\n\n" + PLAIN + END),
    "asked not to think": (of(CLOSED, "<think></think>"), PLAIN + END, None),
    "thought closed at once": (of(CLOSED, "<think>\n"), None,
                               "12 and 30\n</think>\n\n" + PLAIN + END),
    "asked to think, thought left out": (of(BEHIND, "<think>\n"), None, None),
    "thought left out": (of(BEHIND), PLAIN + END, None),
    "channel": (of(CHANNEL + "{{ m.content }}").replace("assistant\n", "assistant"),
                CHANNEL + PLAIN + END, CHANNEL + THOUGHT + END),
    "two tokens behind": (of("<|channel|>{{ m.content }}", "<|channel|>", "<|message|>" + END),
                          PLAIN + "<|message|>" + END, THOUGHT + "<|message|>" + END),
    "no token behind": (of("{{ m.content }}", end=""), PLAIN + END, THOUGHT + END),
    "raw": ("{% for m in messages %}{{ m.content }} {% endfor %}", PLAIN + END, THOUGHT + END),
}  # fmt: skip
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|channel|>", "<|message|>", "<think>", "</think>")
TEXTS = ["user system assistant final", ROW["question"], PLAIN, "Ten. Which base? Then", "\n\n"]


def _byte_level(prefix):
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return (models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel(),
            trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False),
            processors.ByteLevel(trim_offsets=True))  # fmt: skip


def _metaspace(prepend, unigram=False):
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = models.Unigram() if unigram else models.BPE(byte_fallback=True)
    alphabet = [*map(chr, range(32, 127)), "\n", "▁"]
    options = {"vocab_size": 300, "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.UnigramTrainer(unk_token="?", **options) if unigram else (
        trainers.BpeTrainer(**options))  # fmt: skip
    space = {"replacement": "▁", "prepend_scheme": prepend}
    return (model, pre_tokenizers.Metaspace(**space), decoders.Metaspace(**space), trainer, None)


TOKENIZERS = {
    "byte level": lambda: _byte_level(False),
    "byte level, prefix space": lambda: _byte_level(True),
    "metaspace always": lambda: _metaspace("always"),
    "metaspace first": lambda: _metaspace("first"),
    "metaspace never": lambda: _metaspace("never"),
    "unigram": lambda: _metaspace("always", unigram=True),
}


def make(kind, special=SPECIAL, texts=TEXTS):
    """A tokenizer of transformers, trained on a few words."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    model, before, decoder, trainer, after = TOKENIZERS[kind]()
    core = Tokenizer(model)
    core.pre_tokenizer, core.decoder = before, decoder
    core.train_from_iterator(texts, trainer)
    if after:
        core.post_processor = after
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return make(request.param)


def answered(tokenizer, template, answer, row=ROW):
    tokenizer.chat_template = template
    end = end_token(tokenizer, (tokenizer.eos_token_id,))
    return demonstrated(Prompts(tokenizer), end, answer, row)


def demonstrated(prompts, end, answer, row=ROW):
    """The tokens of a demonstration, and which are trained on."""
    group = AnswerWorkflow(prompts, None, ("completion",), end=end).group(
        {**row, "completion": answer}, 0, "row 1"
    )
    ids, mask = group.trajectories[0].tokens, group.trajectories[0].loss_mask
    assert (ids.dtype, mask.dtype, ids[-1]) == (np.int32, bool, end)
    return ids, mask


def spelled(tokenizer, ids):
    """The text of tokens, whose spaces a decoder leaves alone in front of words."""
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text.replace("▁", " ")


def assert_whole(tokenizer, ids, messages):
    """The tokens are those of the template's own rendering, cut behind the end token."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    n = len(ids) - (ids.tolist() != wanted[: len(ids)])  # an end token that the template has not
    assert ids[:n].tolist() == wanted[:n]


def messages(answer):
    given = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    return [{"role": "user", "content": ROW["question"]}, *given]


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("answer", [PLAIN, THOUGHT], ids=["plain", "thought"])
def test_the_tokens_are_the_template_s_own_and_the_answer_s_are_trained(tokenizer, kind, answer):
    template, *texts = TEMPLATES[kind]
    wanted = texts[answer == THOUGHT]
    if wanted is None:
        with pytest.raises(UserError, match=r"chat template.* completion of row 1.*set data.chat_"):
            answered(tokenizer, template, answer)
        return
    ids, mask = answered(tokenizer, template, answer)
    assert_whole(tokenizer, ids, messages(answer))
    trained = spelled(tokenizer, ids[mask]).replace(" ", "")
    wanted = wanted.replace(" ", "")
    if kind == "asked to think":  # a token of two line ends may begin in the prompt
        trained, wanted = (text.replace("\n", "") for text in (trained, wanted))
    assert trained == wanted


def test_all_turns_that_are_marked_are_trained_on(tokenizer):
    ids, mask = answered(tokenizer, MARKED, TURNS)
    assert_whole(tokenizer, ids, messages(TURNS))
    trained = spelled(tokenizer, ids[mask]).replace(" ", "")
    assert trained == "Whichbase?<|im_end|>Then42.<|im_end|>"
    with pytest.raises(UserError, match=r"has 3 messages.*give each turn a row, or set data.chat_"):
        answered(tokenizer, CHATML, TURNS)


@pytest.mark.parametrize("answer", ["", " ", "im_end", "user", "42.\n", " 42. ", "<|im_end|> 42."])
def test_odd_answers_are_trained_on_whole(tokenizer, answer):
    for template in (CHATML, TEMPLATES["no token behind"][0]):
        ids, mask = answered(tokenizer, template, answer)
        trained = spelled(tokenizer, ids[mask])  # a decoder drops the first space
        assert trained.lstrip(" ") == (answer + "<|im_end|>").lstrip(" ")
        assert_whole(tokenizer, ids, messages(answer))


def test_a_word_has_the_token_that_it_has_in_the_text():
    tokenizer = make("metaspace always")
    ids, mask = answered(tokenizer, CHATML, PLAIN)
    alone = tokenizer("The", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(alone)[0].startswith("▁")
    assert tokenizer.convert_ids_to_tokens(ids[mask].tolist())[0].startswith("T")


@pytest.mark.parametrize("system_prompt", ["", "Be brief."])
def test_a_prompt_that_answers_repeat_is_rendered_once(tokenizer, system_prompt):
    tokenizer.chat_template, end = CHATML, tokenizer.eos_token_id
    prompts = Prompts(tokenizer, system_prompt=system_prompt)
    one, other = (demonstrated(prompts, end, answer) for answer in (messages(PLAIN), PLAIN))
    assert [column.tolist() for column in one] == [column.tolist() for column in other]


def test_a_template_may_change_the_spaces_around_a_thought(tokenizer):
    ids, mask = answered(tokenizer, of(SPACED), "<think>12 and 30</think>Then 42.")
    wanted = "<think>\n12 and 30\n</think>\n\nThen 42.<|im_end|>"
    assert spelled(tokenizer, ids[mask]).replace(" ", "") == wanted.replace(" ", "")


@pytest.mark.parametrize(
    ("template", "answer", "message"),
    [
        (CHATML, [{"role": "user", "content": "?"}], "has 1 messages, wanted one of the assi"),
        (CHATML, [], "has 0 messages, wanted one of the assi"),
        (CHATML, TURNS[:2], "has 2 messages, wanted one of the assi"),
        (CHATML + "{{ messages[1].name.last() }}", PLAIN, "the chat template fails on an answer "),
        (of("-"), PLAIN, "leaves '42.' of the completion of row 1 out"),
        (of("{{ m.content[:17] }}"), PLAIN + " So it is.", "leaves 'is.' of the completion of row"),
        (MARKED.replace("<|im_end|>{% endg", "{% endg").replace("{{ m.content }}{% endg", "{% endg")
         .replace("{% endgeneration %}", "{% endgeneration %}{{ m.content }}<|im_end|>"),
         PLAIN, "marks nothing of the completion of row 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_refused(template, answer, message):
    tokenizer = make("byte level")
    with pytest.raises(UserError, match=message) as error:
        answered(tokenizer, template, answer)
    assert "\n" not in str(error.value)


def test_earlier_answers_of_a_question_are_not_trained_on():
    tokenizer, asked = make("byte level"), messages(TURNS)[:3]
    for template in (CHATML, MARKED):
        ids, mask = answered(tokenizer, template, TURNS[2:], {"question": asked})
        assert spelled(tokenizer, ids[mask]) == "Then 42.<|im_end|>"


def test_a_token_without_an_embedding_is_named():
    tokenizer = make("byte level")
    tokenizer.chat_template, end = CHATML, tokenizer.eos_token_id
    known = Prompts(tokenizer, vocab_size=end + 1)
    ids, _ = demonstrated(known, end, PLAIN)
    assert ids.max() == end
    with pytest.raises(UserError, match=r"completion of row 1 has token \d+ \('<.think>'\), and "):
        demonstrated(known, end, THOUGHT)
    known.check({"question": "</think>"}, "row 2")  # spelled in ordinary tokens
    tokenizer.chat_template = "</think>" + CHATML
    asked = Prompts(tokenizer, vocab_size=end + 1)
    with pytest.raises(UserError, match=r"prompt of row 2 has token \d+ \('</think>'\)"):
        asked.check({"question": "x"}, "row 2")
    Prompts(tokenizer, vocab_size=len(tokenizer)).check({"question": "x"}, "row 2")


TRL = importlib.util.find_spec("trl") if importlib.util.find_spec("torch") else None
THEIRS = sorted((Path(TRL.origin).parent / "chat_templates").glob("*.jinja")) if TRL else []
IMAGES = ("idefics3", "llava_next", "smolvlm")  # whose texts are parts of a message
UNCLOSED = ("deepseek_r1_distill", "deepseekv3", "nemotron_3")  # asked to think, answered without


@pytest.mark.witnesses
@pytest.mark.parametrize("path", THEIRS, ids=lambda path: path.stem)
@pytest.mark.parametrize("answer", [PLAIN, THOUGHT, TURNS], ids=["plain", "thought", "turns"])
def test_the_templates_that_trl_has(path, answer):
    template = path.read_text()
    special = {*SPECIAL, "<bos>", *re.findall(r"<[|｜]?[\w/▁ ]+[|｜]?>|\[/?\w+\]", template)}
    tokenizer = make("byte level", sorted(special))
    tokenizer.bos_token, tokenizer.chat_template = "<bos>", template
    marked, asked = "endgeneration" in template, messages(answer)[:1]
    name = path.stem.removesuffix("_training")
    try:
        text = tokenizer.apply_chat_template(messages(answer), tokenize=False)
    except TemplateError:
        assert name.startswith(IMAGES)
        return
    last = re.findall("|".join(map(re.escape, special)), text)[-1]
    end = end_token(tokenizer, (tokenizer.convert_tokens_to_ids(last), tokenizer.eos_token_id))
    try:
        ids, mask = demonstrated(Prompts(tokenizer), end, answer)
    except UserError as error:
        refused = str(error)
        assert "\n" not in refused
        if marked:
            assert answer == THOUGHT or name.startswith(IMAGES), refused
        else:
            assert answer != PLAIN or name.startswith((*IMAGES, *UNCLOSED)), refused
        return
    assert not name.startswith(IMAGES)
    assert_whole(tokenizer, ids, messages(answer))
    if marked:
        found = tokenizer.apply_chat_template(
            messages(answer), return_dict=True, return_assistant_tokens_mask=True
        )["assistant_masks"]
        assert mask[: len(found)].tolist() == [bool(m) for m in found[: len(mask)]]
        return
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    trained = spelled(tokenizer, ids[mask]).lstrip("\n")
    assert (text + tokenizer.decode([end]))[len(prompt) :].lstrip("\n").startswith(trained)
    assert trained.count(PLAIN) == 1
