#!/bin/sh
# Provides Debian's newest servers for the tests, next to the installed ones:
#
#   sid      MySQL, PostgreSQL 18, Redis 8, Valkey 9, etcd 3.5
#   trixie   MariaDB 11.8, ZooKeeper 3.9
#
# Packages are only extracted, into a folder of their own. Their scripts do not run, nothing is
# started, and the machine's own packages do not change. The programs are then patched to load the
# extracted libraries, so any user can run them without chroot.
#
#   newer-servers.sh         extracts missing servers (about a minute, 1 GB) and prints the folder
#   newer-servers.sh where   prints the folder, even if it does not exist
#
# If this is not possible, the script prints the reason, and tests run on the installed servers.
set -eu

# Not in the checkout, because PostgreSQL does not run as root, and its own user may have no access
# there. The folder belongs to root or to this user, so that no other user can change the programs.
if [ "$(id -u)" = 0 ]; then
    folder=/var/cache/leasehold-servers
else
    folder=${XDG_CACHE_HOME:-$HOME/.cache}/leasehold-servers
fi
# Each version of this script has its own folder, and extracts the servers again.
made=$(cksum <"$0" | cut -d ' ' -f 1)
folder=$folder/$made

if [ "${1:-}" = where ]; then
    echo "$folder"
    exit
fi

left_out() {
    echo "newer-servers.sh: no newer servers: $1; tests run on the installed ones" >&2
    exit 0
}

# Extracts from one Debian version. Arguments: its name, the packages, the programs that tests run.
extract() {
    suite=$1 packages=$2 programs=$3
    root=$folder/$suite
    [ ! -e "$root" ] || return 0
    echo "newer-servers.sh: extracting $packages of Debian $suite" >&2
    part=$(mktemp -d "$folder/.$suite.XXXXXX")
    chmod 755 "$part"
    # A mirror that is no longer updated has lists that have expired.
    if ! mmdebstrap --quiet --variant=extract --include="$packages" \
        --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Check-Valid-Until "false"' \
        "$suite" "$part" "$mirror" >"$folder/$suite.log" 2>&1; then
        rm -rf "$part"
        left_out "Debian $suite cannot be had ($folder/$suite.log says why)"
    fi
    rm -rf "$part/var" "$part/usr/share/doc" "$part/usr/share/man" "$part/usr/share/locale"
    # The folder is moved when it is complete, so the libraries are searched in its final place.
    libraries=$root/usr/lib/x86_64-linux-gnu:$root/usr/lib/mysql/private
    for program in $programs; do
        [ -f "$part/$program" ] || left_out "Debian $suite has no $program"
        file=$(readlink -f "$part/$program")
        # Scripts and statically linked programs need no change.
        patchelf --print-interpreter "$file" >/dev/null 2>&1 || continue
        patchelf --set-interpreter "$root/usr/lib64/ld-linux-x86-64.so.2" \
            --force-rpath --set-rpath "$libraries" "$file"
    done
    # Another run may have finished first.
    mv -T "$part" "$root" 2>/dev/null || rm -rf "$part"
}

[ "$(uname -m)" = x86_64 ] || left_out "this is not an x86_64 machine"
for tool in mmdebstrap patchelf; do
    command -v "$tool" >/dev/null || left_out "no $tool here"
done
mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/*.sources 2>/dev/null | head -n 1)
if [ -z "$mirror" ] && [ -r /etc/apt/sources.list ]; then
    mirror=$(awk '$1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /:\/\//) { print $i; exit } }' \
        /etc/apt/sources.list)
fi
[ -n "$mirror" ] || left_out 'apt has no mirror of Debian here'

mkdir -p "$folder"
[ -O "$folder" ] || left_out "$folder is somebody else's"

postgres=''
for program in postgres initdb psql pg_isready; do
    postgres="$postgres usr/lib/postgresql/18/bin/$program"
done
extract sid mysql-server-core,mysql-client-core,postgresql-18,redis-server,valkey-server,etcd-server,etcd-client \
    "usr/sbin/mysqld usr/bin/mysql usr/bin/redis-server usr/bin/valkey-server usr/bin/etcd usr/bin/etcdctl $postgres"
extract trixie mariadb-server-core,mariadb-client-core,libzookeeper-java \
    'usr/sbin/mariadbd usr/bin/mariadb usr/bin/my_print_defaults usr/bin/resolveip'
echo "$folder"
