"""Check that an OpenAI-compatible server answers at a base_url, and say what is wrong if not."""

import json
import re
import urllib.error
import urllib.request

from rlx.base import UserError, unknown
from rlx.debugger.model_call import refusal

_REMEDIES = (  # a pattern of what went wrong → what to change; the first that is found counts
    ("^40[13]", "give --api_key, or set OPENAI_API_KEY"),
    ("^4", "give --base_url as a client takes it, http://127.0.0.1:8000/v1"),
    ("^5", "look at the server's log"),
    ("^ConnectionRefused", "start the server, or correct --base_url"),
    ("^Timeout", "is it still loading its model?"),
    ("SSL", "write http:// where the server has no TLS"),
    ("", "give --base_url=http://127.0.0.1:8000/v1 of an OpenAI-compatible server"),
)


def check(base_url: str, api_key: str, model: str, timeout: float = 30.0) -> tuple[str, ...]:
    """Return the names of the server's models; none where it lists none.

    Args:
      base_url: without a slash at its end.
      model: that agents ask for; "": any.
      timeout: seconds for an answer.

    Raises:
      UserError: it does not answer, refuses, or has no such model; in one line.
    """
    url, code = f"{base_url}/models", 0
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            models = tuple(str(found["id"]) for found in json.loads(answer.read())["data"])
    except urllib.error.HTTPError as error:
        with error:
            code, wrong = error.code, f"{error.code}: {refusal(error.read()) or error.reason}"
    except Exception as error:  # also http.client's, where something else than HTTP is spoken
        reason = getattr(error, "reason", error)
        wrong = f"{type(reason).__name__}: {reason}"
    else:
        if model and models and model not in models:
            raise unknown("model of the server", model, models)
        return models
    if code in (404, 405) and model:
        return ()  # some servers list none; the first run will tell
    remedy = next(words for sign, words in _REMEDIES if re.search(sign, wrong))
    raise UserError(f"{url} gives no list of models ({wrong}); {remedy}")
