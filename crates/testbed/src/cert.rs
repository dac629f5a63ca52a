//! A certificate for 127.0.0.1 and localhost, and the authority that signed it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::daemon::{program, run};

/// Files in PEM. Authority and server are two certificates: clients refuse an authority's own
/// as a server's.
#[derive(Debug)]
pub struct Certificates {
    authority: PathBuf,
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

impl Certificates {
    /// Made anew in the directory, good for two days.
    pub fn make(directory: &Path) -> Self {
        let file = |name: &str| directory.join(name);
        let (authority, authority_key) = (file("authority.pem"), file("authority.key"));
        let (certificate, key, request) = (file("tls.pem"), file("tls.key"), file("tls.csr"));
        let extensions = file("tls.ext");
        std::fs::write(
            &extensions,
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=critical,CA:FALSE\n\
             extendedKeyUsage=serverAuth\n",
        )
        .expect("a file in our directory");
        let openssl = program("openssl", &[], "openssl");
        let new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
        run(Command::new(&openssl)
            .args(["req", "-x509", "-days", "2", "-subj", "/CN=testbed authority"])
            .args(new_key)
            .arg("-keyout")
            .arg(&authority_key)
            .arg("-out")
            .arg(&authority));
        run(Command::new(&openssl)
            .args(["req", "-subj", "/CN=localhost"])
            .args(new_key)
            .arg("-keyout")
            .arg(&key)
            .arg("-out")
            .arg(&request));
        run(Command::new(&openssl)
            .args(["x509", "-req", "-days", "2", "-set_serial", "2", "-in"])
            .arg(&request)
            .arg("-CA")
            .arg(&authority)
            .arg("-CAkey")
            .arg(&authority_key)
            .arg("-extfile")
            .arg(&extensions)
            .arg("-out")
            .arg(&certificate));
        Self { authority, certificate, key }
    }

    /// What a client has to trust.
    pub fn authority(&self) -> &Path {
        &self.authority
    }
}
