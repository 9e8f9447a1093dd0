"""`python -m rlx.gateway`, a process of its own, asked by unmodified clients."""

import asyncio
import json
import signal
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import anthropic
import numpy as np
import pytest
import trustme

from rlx.agents.api_gateway import Gateway
from rlx.agents.sessions import Interaction, Sessions
from rlx.engines.jax.jax_engine import JaxEngine
from rlx.fleet.sample import Completion
from rlx.run.tokenizer_files import load_tokenizer
from tests.fixtures.commands import without_torch

MODEL = "rlx/assets/arithmetic"
ASK = [{"role": "user", "content": "What is 3 + 4?"}]


async def begin(*flags):
    """(process, what it printed) of the command."""
    command = (*without_torch("rlx.gateway"), "--port=0", *flags)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    return process, json.loads(await process.stdout.readline())


def test_the_command_answers_in_front_of_running_servers_and_ends_by_a_signal(agents, tmp_path):
    agents.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "keys").write_text("sk-one\nsk-two\n")
    ca = trustme.CA()
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")

    async def main():
        async with agents.fleet(agents.engine()) as (_, server):
            process, said = await begin(
                f"--model={tmp_path / 'model'}", f"--servers=127.0.0.1:{server.port}",
                f"--keys={tmp_path / 'keys'}", f"--tls-cert={tmp_path / 'both.pem'}",
                f"--tls-key={tmp_path / 'both.pem'}",
            )  # fmt: skip
            try:
                assert said["base_url"].startswith("https://127.0.0.1:")
                http = anthropic.DefaultAsyncHttpxClient(
                    verify=ssl.create_default_context(cafile=tmp_path / "ca.pem")
                )
                options = {"base_url": said["base_url"], "http_client": http, "max_retries": 0}
                asking = anthropic.AsyncAnthropic(api_key="sk-two", **options)
                got = await asking.messages.create(model="m", max_tokens=9, messages=ASK)
                stranger = asking.with_options(api_key="sk-three")
                with pytest.raises(anthropic.AuthenticationError):
                    await stranger.messages.create(model="m", max_tokens=9, messages=ASK)
                await http.aclose()
            finally:
                process.send_signal(signal.SIGTERM)
                await process.wait()
            return got, process.returncode

    got, status = agents.run(main(), 120)
    assert (got.content[0].text, status) == ("What is 3", 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [(("--host=0.0.0.0",), "give --keys=FILE"),
     (("--host=0.0.0.0", "--keys=KEYS"), "--tls-cert and --tls-key"),
     (("--keys=EMPTY",), "has no key"), (("--tls-cert=x",), "give both"),
     (("--servers=127.0.0.1:1", "--engine=vllm"), "--engine=vllm is for a server to start"),
     (("--servers=127.0.0.1:1", "--max-model-len=9"), "--max-model-len=9 is for"),
     (("--servers=127.0.0.1:1", "--dtype=bfloat16"), "--dtype=bfloat16 is for"),
     (("--tls=ca.pem",), "--tls=ca.pem is for --servers"),
     (("--sessions=x",), "--sessions=x needs --admin-key; drop it"),
     (("--idle-seconds=5",), "--idle-seconds=5.0 needs --admin-key")],
)  # fmt: skip
def test_beyond_loopback_there_are_keys_and_tls(tmp_path, flags, words):
    for name, text in (("KEYS", "sk-one"), ("EMPTY", "\n")):
        (tmp_path / name).write_text(text)
    flags = [flag.replace("--keys=", f"--keys={tmp_path}/") for flag in flags]
    command = [*without_torch("rlx.gateway"), f"--model={MODEL}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_key_that_is_let_in_for_good_forgets_and_goes_on(agents, monkeypatch):
    monkeypatch.setattr("rlx.agents.sessions._MOST_TOKENS", 100)
    sessions = Sessions()
    first = sessions.open(agents.sampling, "", endless=True)
    assert sessions.find("any") is first
    first.seed(np.zeros(101, np.int32))
    second = sessions.find("any")
    assert second is not first
    assert (second.key, second.endless, second.defaults) == ("", True, agents.sampling)
    drawn = Completion(np.zeros(101, np.int32), None, None, "length")
    second.keep(Interaction("id", 0, np.zeros(1, np.int32), "", drawn, "", ""))
    assert sessions.find("any") is not second, "few words may have long answers"


@pytest.mark.parametrize("kind", ["whole", "streamed", "synchronous"])
def test_anthropics_client_asks_the_embedded_model_and_its_tokens_are_kept(agents, kind):
    """What is recorded is what was sampled: the same request to the fleet gives it again."""

    async def ask(gateway, key):
        options = {"base_url": gateway.base_url(), "api_key": key, "max_retries": 0}
        request = {"model": "m", "max_tokens": 8, "messages": ASK}
        if kind == "synchronous":
            asking = anthropic.Anthropic(**options)
            return await asyncio.to_thread(lambda: asking.messages.create(**request))
        async with anthropic.AsyncAnthropic(**options) as asking:
            if kind == "whole":
                return await asking.messages.create(**request)
            async with asking.messages.stream(**request) as stream:
                return await stream.get_final_message()

    async def main():
        tokenizer = load_tokenizer(Path(MODEL))
        async with agents.fleet(JaxEngine(MODEL, slots=2, max_model_len=64)) as (fleet, _):
            gateway = Gateway(fleet, tokenizer)
            await gateway.start()
            try:
                session = gateway.sessions.open(agents.sampling)
                got = await ask(gateway, session.key)
                (kept,) = session.interactions
                again = gateway.sessions.open(agents.sampling).seed(kept.prompt_tokens)
                sampling = replace(agents.sampling, max_new_tokens=8, seed=again)
                (drawn,) = await fleet.generate(kept.prompt_tokens, sampling, 1)
            finally:
                await gateway.stop()
            return got, kept, drawn, tokenizer

    got, kept, drawn, tokenizer = agents.run(main(), 120)
    assert kept.completion.tokens.tolist() == drawn.tokens.tolist()
    assert kept.completion.logprobs.tolist() == pytest.approx(drawn.logprobs.tolist(), abs=1e-4)
    words = tokenizer.decode(kept.completion.tokens, skip_special_tokens=True)
    assert "".join(block.text for block in got.content) == words
    assert got.usage.output_tokens == len(drawn.tokens)
    assert tokenizer.encode(kept.prompt_text) == kept.prompt_tokens.tolist()
