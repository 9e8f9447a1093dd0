"""Text files of users may begin with a byte order mark, which is no part of their text."""

from argparse import Namespace

from rlx.agents.online import OnlineOptions
from rlx.fleet.addresses import read_addresses
from rlx.model import directory
from rlx.rewards.judge import _read
from rlx.run import serving
from rlx.run.tokenizer_files import load_tokenizer, read_prompts
from rlx.system.image_store import ImageStore

MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"


def test_a_byte_order_mark_is_no_part_of_a_key_address_prompt_or_template(tmp_path):
    def file(text):
        (tmp_path / "file").write_text(MARK + text, encoding="utf-8")
        return str(tmp_path / "file")

    flags = {"tls_cert": "", "tls_key": "", "host": "127.0.0.1", "idle_seconds": 1.0}
    assert serving.guards(Namespace(keys=file("sk-one\r\nsk-two\r\n"), **flags))[0] == (
        "sk-one", "sk-two"
    )  # fmt: skip
    admin = OnlineOptions.from_flags(Namespace(admin_key=file("k" * 48 + "\n"), **flags))
    assert admin.admin_key == "k" * 48
    assert read_addresses((f"@{file('a:1')}",)) == ("a:1",)
    assert _read(file("Is it right?")) == "Is it right?"
    model = directory.resolve("rlx:arithmetic")
    (tmp_path / "plain").write_text("2+2=?\n")
    marked = read_prompts(file("2+2=?\n"), model, 9, ImageStore())
    assert marked == read_prompts(str(tmp_path / "plain"), model, 9, ImageStore())
    template = load_tokenizer(model).chat_template
    assert load_tokenizer(model, chat_template=file(template)).chat_template == template
