#!/bin/sh
# Makes a certificate for the SuperLink, a key for each site, and the authority that signs.
#
#   sh certificates.sh keys superlink.example.org 10.0.0.5 site-0 site-1 site-2
#
# keys/       ca.crt for everybody; server.pem and server.key for the SuperLink; a key pair for each site
# authority/  ca.key signs certificates and does nothing else. Whoever has it can pose as the SuperLink:
#             move this folder to a medium that is kept offline. No running machine needs it.
#
# The SuperLink's certificate is valid for 365 days, the authority for 10 years. To renew, bring the
# folder back and name a new folder for the keys: the sites keep ca.crt and their keys.
#
#   sh certificates.sh keys-2 superlink.example.org 10.0.0.5
#
# AUTHORITY names another folder for the authority.
set -eu
umask 077
fail() {
    echo "certificates.sh: $*" >&2
    exit 2
}
[ $# -ge 3 ] || fail "usage: sh certificates.sh FOLDER HOST ADDRESS [SITE...]"
folder=$1 host=$2 address=$3 authority=${AUTHORITY:-authority} days=365
shift 3
for tool in openssl ssh-keygen; do
    command -v $tool >/dev/null || fail "$tool is not installed"
done
case $folder in -*) fail "FOLDER must not begin with a dash: $folder" ;; esac
[ ! -e "$folder" ] || fail "$folder exists: keys are not overwritten; choose another folder"
case $host in -* | .* | *[!A-Za-z0-9.-]* | '') fail "HOST must be a host name: $host" ;; esac
case $address in *[!0-9a-fA-F.:]* | '') fail "ADDRESS must be an IP address: $address" ;; esac
for site in "$@"; do
    case $site in
    -* | .* | *[!A-Za-z0-9._-]* | ca.* | server.* | '')
        fail "SITE must consist of letters, digits, '.', '_' and '-', and not be ca.* or server.*: $site" ;;
    esac
done

mkdir -p "$(dirname "$folder")"
work=$(mktemp -d "$(dirname "$folder")/.certificates.XXXXXX")  # a failure leaves no half-made keys
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
quietly() {
    "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
}
cat >"$work/openssl.cnf" <<END
[req]
distinguished_name = name
prompt = no
[name]
CN = \${ENV::CERTIFICATE_NAME}
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = DNS:$host, IP:$address
END
new_key() {
    quietly openssl ecparam -name secp384r1 -genkey -noout -out "$1"
}

if [ -e "$authority" ]; then
    for file in ca.key ca.crt; do
        [ -r "$authority/$file" ] || fail "$authority exists, but has no $file"
    done
    openssl x509 -in "$authority/ca.crt" -noout -checkend $((days * 86400)) >/dev/null ||
        fail "$authority expires within $days days: make a new one (AUTHORITY=...) and give everybody its ca.crt"
    signer=$authority
else
    signer=$work/authority
    mkdir "$signer"
    new_key "$signer/ca.key"
    CERTIFICATE_NAME="noisewise federation" quietly openssl req -x509 -new -config "$work/openssl.cnf" \
        -extensions authority -key "$signer/ca.key" -sha384 -days 3650 -out "$signer/ca.crt"
fi

keys=$work/keys
mkdir "$keys"
cp "$signer/ca.crt" "$keys/ca.crt"
new_key "$keys/server.key"
CERTIFICATE_NAME=$host quietly openssl req -new -config "$work/openssl.cnf" -key "$keys/server.key" \
    -sha384 -out "$work/server.csr"
CERTIFICATE_NAME=$host quietly openssl x509 -req -in "$work/server.csr" -CA "$signer/ca.crt" \
    -CAkey "$signer/ca.key" -set_serial "0x$(openssl rand -hex 16)" -sha384 -days $days \
    -extfile "$work/openssl.cnf" -extensions server -out "$keys/server.pem"
quietly openssl verify -x509_strict -CAfile "$keys/ca.crt" -purpose sslserver -verify_hostname "$host" "$keys/server.pem"
for site in "$@"; do
    quietly ssh-keygen -q -t ecdsa -b 384 -N "" -C "$site" -f "$keys/$site"
done

[ "$signer" = "$authority" ] || mv "$signer" "$authority"
mv "$keys" "$folder"
echo "$folder: ca.crt (for everybody), server.pem and server.key (for the SuperLink), $# site keys"
echo "$authority: ca.key signs certificates; move this folder to a medium that is kept offline"
openssl x509 -in "$folder/server.pem" -noout -enddate | sed 's/notAfter=/the SuperLink needs a new certificate before /'
