#!/usr/bin/env bash
# Installs the benchmark's requirements that ./test.sh does not install: protoc for etcd-client, python-redis-lock in
# its own environment, and node-redlock.
set -euo pipefail
cd "$(dirname "$0")"
if ! command -v protoc >/dev/null || [ ! -e /usr/include/google/protobuf/descriptor.proto ]; then
    sudo=''
    [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get -qq install -y --no-install-recommends protobuf-compiler libprotobuf-dev
fi
mkdir -p target
[ -e target/python/bin/python ] || python3 -m venv target/python
target/python/bin/pip install --quiet --disable-pip-version-check redis==7.0.1 python-redis-lock==4.0.0
npm install --prefix target/node --silent --no-audit --no-fund redlock@4.2.0 ioredis@5
