"""Checks that an OpenAI-compatible server answers at a base_url, and says what is wrong if not."""

import difflib
import json
import urllib.error
import urllib.parse
import urllib.request

from rlx.base import UserError
from rlx.debugger.recorder import refusal


def check_url(base_url: str) -> str:
    """Return the address without its last slash.

    Raises:
      UserError: it is none.
    """
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


def check(base_url: str, api_key: str, model: str, timeout: float = 30.0) -> tuple[str, ...]:
    """Return the names of the server's models; none where it lists none.

    Args:
      model: that agents ask for; "": any.
      timeout: seconds for an answer.

    Raises:
      UserError: it does not answer, refuses, or has no such model; in one line.
    """
    url = f"{base_url}/models"
    status, body = _get(url, api_key, timeout)
    if status in (404, 405):
        below = f"{base_url}/v1/models"
        if not base_url.endswith("/v1") and _get(below, api_key, timeout)[0] not in (404, 405):
            raise UserError(f"{url} does not exist, {below} does; give --base_url={base_url}/v1")
        if model:
            return ()  # some servers list none; the first run will tell
    if status >= 400:
        raise _refused(url, status, refusal(body), api_key)
    try:
        models = tuple(str(found["id"]) for found in json.loads(body)["data"])
    except (ValueError, KeyError, TypeError):
        start = " ".join(body[:60].decode("utf-8", "replace").split())
        raise UserError(
            f"{url} answers something else than a list of models ({start!r}); is it an "
            "OpenAI-compatible server, and does --base_url end in /v1?"
        ) from None
    if model and models and model not in models:
        near = difflib.get_close_matches(model, models, n=1)
        hint = f"did you mean --model={near[0]}?" if near else f"it has {', '.join(models[:20])}"
        raise UserError(f"the server has no model {model!r}; {hint}")
    return models


def _refused(url: str, status: int, words: str, api_key: str) -> UserError:
    said = f"({status}: {words})" if words else f"({status})"
    if status in (401, 403):
        given = "the API key that was given" if api_key else "a request without an API key"
        return UserError(f"{url} refuses {given} {said}; give --api_key, or set OPENAI_API_KEY")
    if status == 404:
        return UserError(
            f"{url} does not exist {said}; give the --base_url of an OpenAI-compatible server, …/v1"
        )
    remedy = "look at the server's log" if status >= 500 else "mend what it says"
    return UserError(f"{url} refuses the request {said}; {remedy}")


def _get(url: str, api_key: str, timeout: float) -> tuple[int, bytes]:
    """Return the (status, body) of an answer; raise UserError where there is none."""
    request = urllib.request.Request(url)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except Exception as error:  # also http.client's, where something else than HTTP is spoken
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            words = f"{url} gave no answer in {timeout:g} s; is it still loading its model?"
        elif isinstance(reason, ConnectionRefusedError):
            words = (
                f"nothing listens at {url} (connection refused); start the server, or correct "
                "--base_url"
            )
        elif "SSL" in str(reason):
            words = f"no TLS with {url} ({reason}); write http:// where the server has no TLS"
        else:
            words = f"cannot reach {url} ({type(reason).__name__}: {reason}); correct --base_url"
        raise UserError(words) from error
