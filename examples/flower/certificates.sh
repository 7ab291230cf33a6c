#!/bin/sh
# A certificate authority of your own, a certificate for the SuperLink and one key for each site.
#   sh certificates.sh keys superlink.example.org 10.0.0.5 site-0 site-1 site-2
set -eu
[ $# -ge 4 ] || { echo "usage: sh certificates.sh FOLDER HOST ADDRESS SITE..." >&2; exit 2; }
folder=$1 host=$2 address=$3
shift 3
[ ! -e "$folder" ] || { echo "$folder is there already: its keys are not overwritten" >&2; exit 2; }
for tool in openssl ssh-keygen; do
    command -v $tool >/dev/null || { echo "$tool is not installed" >&2; exit 2; }
done
umask 077
mkdir -p "$folder"
cd "$folder"
quietly() {
    openssl "$@" 2>openssl.log || { cat openssl.log >&2; exit 1; }
    rm openssl.log
}
quietly req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 365 -sha256 \
    -keyout ca.key -out ca.crt -subj "/CN=noisewise federation"
quietly req -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -sha256 \
    -keyout server.key -out server.csr -subj "/CN=$host"
printf 'subjectAltName=DNS:%s,IP:%s\n' "$host" "$address" > server.ext
quietly x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -sha256 \
    -extfile server.ext -out server.pem
for site in "$@"; do
    ssh-keygen -q -t ecdsa -b 384 -N "" -C "$site" -f "$site"
done
echo "in $folder: ca.crt (to everybody), server.pem and server.key (SuperLink), a key for each site"
