//! A certificate for 127.0.0.1 and localhost, one for a client, and the authority that signed both.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{program, run};

/// Certificates and keys, as files in PEM format. The authority and the server have separate
/// certificates, because clients refuse an authority's own certificate as a server's.
#[derive(Debug)]
pub struct Certificates {
    pub(crate) authority: PathBuf,
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
    client: (PathBuf, PathBuf),
}

const NEW_KEY: [&str; 5] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];

impl Certificates {
    /// Creates the files in the directory. The certificates are valid for two days.
    pub fn make(directory: &Path) -> Self {
        let file = |name: &str| directory.join(name);
        let (authority, authority_key) = (file("authority.pem"), file("authority.key"));
        run(Command::new(program("openssl", &[], "openssl"))
            .args(["req", "-x509", "-days", "2", "-subj", "/CN=testbed authority"])
            .args(NEW_KEY)
            .arg("-keyout")
            .arg(&authority_key)
            .arg("-out")
            .arg(&authority));
        let signed = |stem: &str, subject: &str, extensions: &str| {
            sign(directory, (&authority, &authority_key), stem, subject, extensions)
        };
        let (certificate, key) = signed(
            "tls",
            "/CN=localhost",
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth\n",
        );
        let client = signed(
            "client",
            "/CN=client",
            "subjectAltName=DNS:client.example\nextendedKeyUsage=clientAuth\n",
        );
        Self { authority, certificate, key, client }
    }

    /// Returns the certificate that a client must trust.
    pub fn authority(&self) -> &Path {
        &self.authority
    }

    /// Returns the server's certificate and its key.
    pub fn server(&self) -> (&Path, &Path) {
        (&self.certificate, &self.key)
    }

    /// Returns a client's certificate, whose DNS name is `client.example`, and its key.
    pub fn client(&self) -> (&Path, &Path) {
        (&self.client.0, &self.client.1)
    }
}

/// Creates a key and a certificate for it, signed by the authority.
fn sign(
    directory: &Path,
    (authority, authority_key): (&Path, &Path),
    stem: &str,
    subject: &str,
    extensions: &str,
) -> (PathBuf, PathBuf) {
    let openssl = program("openssl", &[], "openssl");
    let file = |ending: &str| directory.join(format!("{stem}.{ending}"));
    let (certificate, key, request, extended) =
        (file("pem"), file("key"), file("csr"), file("ext"));
    std::fs::write(&extended, format!("basicConstraints=critical,CA:FALSE\n{extensions}"))
        .expect("a file in our directory");
    run(Command::new(&openssl)
        .args(["req", "-subj", subject])
        .args(NEW_KEY)
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&request));
    run(Command::new(&openssl)
        .args(["x509", "-req", "-days", "2", "-CAcreateserial", "-in"])
        .arg(&request)
        .arg("-CA")
        .arg(authority)
        .arg("-CAkey")
        .arg(authority_key)
        .arg("-extfile")
        .arg(&extended)
        .arg("-out")
        .arg(&certificate));
    (certificate, key)
}
