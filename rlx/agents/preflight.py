"""Whether an OpenAI-compatible server answers at a base_url, and what is wrong if it does not."""

import difflib
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from rlx.agents.exchange import refusal
from rlx.base import UserError
from rlx.config import unknown

PROMPT = "Say hi."


@dataclass(frozen=True, slots=True)
class Answers:
    """What the server said.

    Attributes:
      models: that it lists; empty where it lists none.
      model: that the completion was asked of.
      seconds: of a completion of one token.
    """

    models: tuple[str, ...]
    model: str
    seconds: float


def check_url(base_url: str) -> str:
    """The address without its last slash; raises UserError where it is none."""
    try:
        parts = urllib.parse.urlsplit(base_url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        good = False
    if not good:
        raise UserError(
            f"--base_url={base_url!r} is no address; write http://127.0.0.1:8000/v1, with scheme"
        )
    if parts.path.rstrip("/").endswith(("/chat/completions", "/completions", "/models")):
        raise UserError(
            f"--base_url={base_url} names a route; give what comes before it, …/v1, as to a client"
        )
    return base_url.rstrip("/")


def check(base_url: str, api_key: str, model: str, timeout: float = 30.0) -> Answers:
    """Lists the models and asks for one token.

    Args:
      model: that agents ask for; "": the first of the list.
      timeout: seconds for each of the two.

    Raises:
      UserError: it does not answer, refuses, or has no such model; in one line.
    """
    ask = _Asking(base_url, api_key, timeout)
    models = ask.models()
    if model and models and model not in models:
        raise _unknown_model(model, models)
    if not model and not models:
        raise UserError(f"{base_url} does not list its models; give --model=NAME")
    if not model and len(models) > 20:  # a provider's list, in no order that helps
        raise UserError(f"{base_url} has {len(models)} models; choose one by --model=NAME")
    model = model or models[0]
    return Answers(models, model, ask.completion(model))


class _Asking:
    def __init__(self, base_url: str, api_key: str, timeout: float):
        self._url, self._key, self._timeout = base_url, api_key, timeout

    def models(self) -> tuple[str, ...]:
        status, body = self._ask(f"{self._url}/models")
        if status in (404, 405):
            self._missing_version()
            return ()  # some servers list none; the completion will tell
        self._refused(status, body, "/models")
        try:
            return tuple(str(found["id"]) for found in json.loads(body)["data"])
        except (ValueError, KeyError, TypeError):
            start = " ".join(body[:60].decode("utf-8", "replace").split())
            raise UserError(
                f"{self._url}/models answers something else than a list of models ({start!r}); is "
                "it an OpenAI-compatible server, and does --base_url end in /v1?"
            ) from None

    def completion(self, model: str) -> float:
        """Seconds of one token."""
        request: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 1,
        }
        began = time.monotonic()
        status, body = self._ask(f"{self._url}/chat/completions", request)
        if status == 400 and b"max_completion_tokens" in body:  # as OpenAI's reasoning models say
            del request["max_tokens"]
            began = time.monotonic()
            status, body = self._ask(
                f"{self._url}/chat/completions", {**request, "max_completion_tokens": 16}
            )
        if status == 404 and "model" in refusal(body).lower():
            raise UserError(f"{self._url} has no model {model!r} ({refusal(body)}); give --model")
        self._refused(status, body, "/chat/completions")
        return time.monotonic() - began

    def _missing_version(self) -> None:
        """Raises UserError where the address is right but for its /v1."""
        if urllib.parse.urlsplit(self._url).path.rstrip("/").endswith("/v1"):
            return
        status, _ = self._ask(f"{self._url}/v1/models")
        if status < 400 or status in (401, 403):
            raise UserError(
                f"{self._url}/models does not exist, {self._url}/v1/models does; give "
                f"--base_url={self._url}/v1"
            )

    def _refused(self, status: int, body: bytes, path: str) -> None:
        """Raises UserError where the status is a refusal."""
        if status < 400:
            return
        words = refusal(body)
        said = f": {words}" if words else ""
        if status in (401, 403):
            given = "the API key that was given" if self._key else "a request without an API key"
            raise UserError(
                f"{self._url} refuses {given} ({status}{said}); give --api_key, or set "
                "OPENAI_API_KEY"
            )
        if status == 404:
            raise UserError(
                f"{self._url}{path} does not exist (404{said}); give the --base_url of an "
                "OpenAI-compatible server, …/v1"
            )
        if status == 429:
            raise UserError(f"{self._url}{path}: too many requests (429{said}); wait, or pay")
        remedy = "look at the server's log" if status >= 500 else "mend what it says"
        raise UserError(f"{self._url}{path} answers {status}{said}; {remedy}")

    def _ask(self, url: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = json.dumps(body).encode() if body else None
        try:
            request = urllib.request.Request(url, data, headers)
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error
        except Exception as error:  # http.client's: it speaks something else
            raise UserError(
                f"what listens at {self._url} does not speak HTTP ({type(error).__name__}); "
                "correct the port in --base_url"
            ) from error

    def _unreachable(self, error: Exception) -> UserError:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError) or "timed out" in str(reason):
            return UserError(
                f"{self._url} gave no answer in {self._timeout:g} s; is it still loading its "
                "model, or behind a firewall?"
            )
        if isinstance(reason, ConnectionRefusedError):
            return UserError(
                f"nothing listens at {self._url} (connection refused); start the server, or "
                "correct --base_url"
            )
        if "SSL" in str(reason) or "WRONG_VERSION" in str(reason):
            return UserError(
                f"no TLS with {self._url} ({reason}); write http:// where the server has no TLS"
            )
        return UserError(f"cannot reach {self._url} ({reason}); correct --base_url")


def _unknown_model(model: str, models: tuple[str, ...]) -> UserError:
    lower = {name.lower(): name for name in models}
    near = difflib.get_close_matches(model.lower(), lower, n=1, cutoff=0.4)
    if near or len(models) == 1:
        name = lower[near[0]] if near else models[0]
        more = f" (it has {len(models)})" if len(models) > 1 else ""
        return UserError(f"the server has no model {model!r}{more}; did you mean --model={name}?")
    return unknown("model", model, models[:20])
