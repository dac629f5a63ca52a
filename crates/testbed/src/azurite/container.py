"""Creates a container in Azurite, with a signed request. Arguments: port, account, key, container."""

import base64
import email.utils
import hashlib
import hmac
import sys
import urllib.error
import urllib.request

port, account, key, container = sys.argv[1:]
date = email.utils.formatdate(usegmt=True)
headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
named = "".join(f"{name}:{value}\n" for name, value in headers.items())
# The text to sign: the method, eleven empty headers, the headers that are sent, and the resource.
text = "PUT" + "\n" * 12 + named + f"/{account}/{account}/{container}\nrestype:container"
digest = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
url = f"http://127.0.0.1:{port}/{account}/{container}?restype=container"
try:
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=20)
except urllib.error.HTTPError as error:
    # 409: the container exists.
    if error.code != 409:
        sys.exit(f"{error.code} {error.read().decode()}")
