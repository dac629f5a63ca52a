//! Secrets that are in files, so that they are in no command line: the password of a URL, and a
//! whole URL.
//!
//! `password_file=PATH` is resolved here, before a store sees its URL, so it works for every store
//! whose URL has a password. The file is read each time that the store is opened. One line end
//! after the secret is not part of it.
//!
//! A file that all users of the machine may read is used, because secrets that a container is given
//! are like that. [`public_secrets`] reports it.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::LazyLock;

use crate::base::percent::{Escaped, decoded};
use crate::words::doctor::Finding;
use crate::words::error::{Error, ErrorKind, Result};

/// The environment variables that name a store.
const STORE: &str = "LEASEHOLD_STORE";
const STORE_FILE: &str = "LEASEHOLD_STORE_FILE";
/// The default of `--store` if a file contains the URL. It is shown in errors.
const IN_FILE: &str = "$LEASEHOLD_STORE_FILE";
/// The parameter that names the file with the password.
const PASSWORD_FILE: &str = "password_file";
/// The parameters that a file can replace, each with the one that names the file.
const PARAMETERS: [(&str, &str); 2] =
    [(PASSWORD_FILE, "password"), ("sentinel_password_file", "sentinel_password")];
/// The longest secret, in bytes.
const LONGEST: u64 = 64 * 1024;
/// URLs that have no password. What looks like parameters may be a part of a path.
const WITHOUT: [&str; 6] = ["file", "memory", "sqlite", "s3", "gs", "az"];

/// Returns the URL with the passwords in place of the parameters that name their files. What
/// [`store_url`] could not read is read again.
///
/// # Errors
/// - [`Config`](ErrorKind::Config): a file cannot be read, is empty or is not text, or the URL has
///   a password as well.
pub fn with_passwords(url: &str) -> Result<Cow<'_, str>> {
    if let Some(read) = in_file(url) {
        return Ok(Cow::Owned(with_passwords(&read?)?.into_owned()));
    }
    let Some((scheme, base, query)) = parts(url) else { return Ok(Cow::Borrowed(url)) };
    let is_file = |pair: &&str| file_of(pair).is_some();
    if !query.split('&').any(|pair| is_file(&pair)) {
        return Ok(Cow::Borrowed(url));
    }
    let (mut base, mut kept) = (base.to_owned(), Vec::new());
    for pair in query.split('&') {
        let Some((parameter, replaced, path)) = file_of(pair) else {
            kept.push(pair.to_owned());
            continue;
        };
        let path = decoded(path, |_| true).ok_or_else(|| {
            Error::new(ErrorKind::Config, format!("invalid percent-encoding in {parameter}"))
                .with_hint("write a literal % as %25, and other text as UTF-8")
        })?;
        let secret = read(parameter, Path::new(&path))?;
        let secret = Escaped(&secret).to_string();
        match replaced {
            "password" => match inserted(scheme, &base, &secret)? {
                Some(whole) => base = whole,
                None => kept.push(format!("password={secret}")),
            },
            replaced => kept.push(format!("{replaced}={secret}")),
        }
    }
    let query = if kept.is_empty() { String::new() } else { format!("?{}", kept.join("&")) };
    Ok(Cow::Owned(format!("{scheme}://{base}{query}")))
}

/// Scheme, what is before the parameters, and the parameters, of a URL that may have a password.
fn parts(url: &str) -> Option<(&str, &str, &str)> {
    let (scheme, rest) = url.split_once("://").filter(|(scheme, _)| !WITHOUT.contains(scheme))?;
    // A ? before the last @ is a part of a password, and such a URL is rejected by its store.
    let (base, query) = rest.split_once('?').filter(|(_, query)| !query.contains('@'))?;
    Some((scheme, base, query))
}

/// The parameter, the one that it replaces, and the path, if this parameter names a file.
fn file_of(pair: &str) -> Option<(&'static str, &'static str, &str)> {
    let (key, path) = pair.split_once('=')?;
    let (parameter, replaced) = PARAMETERS.into_iter().find(|(known, _)| *known == key)?;
    Some((parameter, replaced, path))
}

/// The rest of a URL with this password before the hosts, or `None` if it names no host.
fn inserted(scheme: &str, base: &str, secret: &str) -> Result<Option<String>> {
    let (credentials, rest) = match base.rsplit_once('@') {
        Some((credentials, rest)) => (credentials, rest),
        None => ("", base),
    };
    if credentials.contains(':') {
        let what = format!("the URL has both a password and {PASSWORD_FILE}");
        return Err(Error::new(ErrorKind::Config, what).with_hint("remove one of them"));
    }
    if rest.is_empty() || rest.starts_with('/') {
        return Ok(None);
    }
    // The token of NATS is in the place of the user.
    let before = if scheme == "nats" && credentials.is_empty() { "" } else { ":" };
    Ok(Some(format!("{credentials}{before}{secret}@{rest}")))
}

/// The secret in a file. `named_by` is the parameter or variable that names it.
fn read(named_by: &str, path: &Path) -> Result<String> {
    let refused = |what: &str, hint: &str| {
        let what = format!("cannot use {named_by}={path:?}: {what}");
        Error::new(ErrorKind::Config, what).with_hint(hint)
    };
    let read = std::fs::File::open(path).and_then(|file| {
        use std::io::Read;
        let mut bytes = Vec::new();
        file.take(LONGEST + 1).read_to_end(&mut bytes).map(|_| bytes)
    });
    let bytes = read.map_err(|why| {
        refused(&why.to_string(), "name a file that this user may read, by its absolute path")
    })?;
    if bytes.len() as u64 > LONGEST {
        return Err(refused("the file is too long", "name a file with nothing but the secret"));
    }
    let text = String::from_utf8(bytes).map_err(|_| {
        refused("the file is not UTF-8 text", "name a file with the secret as text")
    })?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    match text {
        "" => Err(refused("the file is empty", "write the secret into the file")),
        text if text.contains(char::is_control) => Err(refused(
            "the file has more than one line",
            "write the secret into it as one line, and nothing else",
        )),
        text => Ok(text.to_owned()),
    }
}

/// Returns the URL of the store that the environment names: `LEASEHOLD_STORE`, or else the contents
/// of the file that `LEASEHOLD_STORE_FILE` names. `None` if neither is set.
///
/// # Errors
/// - [`Config`](ErrorKind::Config): the file cannot be read, is empty or is not text, or
///   `LEASEHOLD_STORE` is not UTF-8.
pub fn store_of_environment() -> Result<Option<String>> {
    match named().to_str() {
        Some("") => Ok(None),
        Some(text) => in_file(text).unwrap_or_else(|| Ok(text.to_owned())).map(Some),
        None => Err(Error::new(ErrorKind::Config, format!("{STORE} is not valid UTF-8"))),
    }
}

/// Returns the default of an option `--store`, for [`store_url`]: what the environment says, or an
/// empty text.
pub fn default_store() -> &'static OsStr {
    static DEFAULT: LazyLock<OsString> = LazyLock::new(named);
    &DEFAULT
}

/// What the environment says: a URL, or that it is in a file.
fn named() -> OsString {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    set(STORE).or_else(|| set(STORE_FILE).map(|_| IN_FILE.into())).unwrap_or_default()
}

/// Returns the store's URL for a value of `--store`. If the URL is in a file that cannot be used,
/// the value itself is returned, and opening the store reports the reason. (clap parses an option's
/// default even if the option was given, so an error here could be wrong.)
pub fn store_url(value: &str) -> String {
    in_file(value).and_then(Result::ok).unwrap_or_else(|| value.to_owned())
}

/// The URL in the file, if that is where `value` says that it is.
fn in_file(value: &str) -> Option<Result<String>> {
    let path = std::env::var_os(STORE_FILE).filter(|_| value == IN_FILE)?;
    Some(read(STORE_FILE, Path::new(&path)))
}

/// Returns what is wrong with the files that this URL names its secrets by, for the doctor.
pub fn public_secrets(url: &str) -> Vec<Finding> {
    let query = parts(url).map_or("", |(.., query)| query);
    let named = query.split('&').filter_map(|pair| {
        let (parameter, _, path) = file_of(pair)?;
        Some((parameter, OsString::from(decoded(path, |_| true)?)))
    });
    let whole = std::env::var_os(STORE_FILE).filter(|_| default_store() == IN_FILE);
    let all = named.chain(whole.map(|path| (STORE_FILE, path)));
    all.filter(|(_, path)| is_public(Path::new(path)))
        .map(|(named_by, path)| {
            Finding::weak(
                "public-secret",
                format!("every user of this machine may read {named_by}={path:?}"),
                "other users can use the store with this client's permissions",
                format!("chmod o-r {}", Quoted(&path.to_string_lossy())),
            )
        })
        .collect()
}

fn is_public(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|seen| seen.permissions().mode() & 0o004 > 0)
}

/// A path as a shell reads it.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
        match self.0.chars().all(is_plain) {
            true => f.write_str(self.0),
            false => write!(f, "'{}'", self.0.replace('\'', r"'\''")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &[u8]) -> tempfile::TempPath {
        let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        std::fs::write(&file, text).unwrap();
        file
    }

    fn shown(error: &Error) -> String {
        format!("{error:#}")
    }

    #[test]
    fn a_password_from_a_file_is_put_where_the_password_is() {
        let secret = file(b"p@s:s/%\n");
        let path = secret.display();
        for (url, whole) in [
            ("redis://h:1/0?a=b&FILE&c=d", "redis://:p%40s%3As%2F%25@h:1/0?a=b&c=d"),
            ("postgres://u%40x@h/d?FILE", "postgres://u%40x:p%40s%3As%2F%25@h/d"),
            ("etcd://u@a,b,c?FILE", "etcd://u:p%40s%3As%2F%25@a,b,c"),
            ("nats://u@h?FILE", "nats://u:p%40s%3As%2F%25@h"),
            ("nats://h/bucket?FILE", "nats://p%40s%3As%2F%25@h/bucket"),
            ("redis+unix:///run/s?db=1&FILE", "redis+unix:///run/s?db=1&password=p%40s%3As%2F%25"),
            (
                "redis+sentinel://a/m?sentinel_FILE",
                "redis+sentinel://a/m?sentinel_password=p%40s%3As%2F%25",
            ),
        ] {
            let url = url.replace("FILE", &format!("password_file={path}"));
            assert_eq!(with_passwords(&url).unwrap(), whole, "{url}");
        }
    }

    #[test]
    fn other_urls_stay_as_they_are() {
        for url in [
            "redis://u:p@h?prefix=x",
            "file:/tmp/a?password_file=/x",
            "file:///tmp/a?password_file=/x",
            "s3://bucket?password_file=/x",
            "redis://u:p?password_file=/x@h",
            "memory:",
            "",
        ] {
            assert!(matches!(with_passwords(url), Ok(Cow::Borrowed(same)) if same == url), "{url}");
        }
    }

    #[test]
    fn a_file_that_is_no_secret_is_refused_with_its_name() {
        let refused = |text: &[u8], expected: &str| {
            let secret = file(text);
            let url = format!("redis://h?password_file={}", secret.display());
            let error = with_passwords(&url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            let told = shown(&error);
            assert!(told.contains(expected) && told.contains(secret.to_str().unwrap()), "{told}");
            assert!(!told.contains("sekret") && told.lines().count() == 1, "{told}");
        };
        refused(b"", "is empty");
        refused(b"\n", "is empty");
        refused(b"sekret\nsekret\n", "more than one line");
        refused(b"sekret\xff", "not UTF-8");
        refused("sekret".repeat(20_000).as_bytes(), "too long");
        let told = shown(&with_passwords("redis://h?password_file=/no/file").unwrap_err());
        assert!(told.contains("password_file=\"/no/file\": No such file"), "{told}");
        let secret = file(b"sekret");
        let both = format!("redis://u:sekret@h?password_file={}", secret.display());
        let told = shown(&with_passwords(&both).unwrap_err());
        assert!(told.contains("both") && !told.contains("sekret"), "{told}");
    }

    #[test]
    fn a_secret_that_all_may_read_is_reported() {
        let secret = file(b"x");
        let url = format!("redis://h?password_file={}", secret.display());
        for (mode, count) in [(0o600, 0), (0o640, 0), (0o644, 1), (0o444, 1)] {
            std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(public_secrets(&url).len(), count, "{mode:o}");
        }
        assert_eq!(Quoted("/a b").to_string(), "'/a b'");
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn a_url_from_outside_shows_no_secret(url in testbed::texts(&[
            "redis://u:sekret@h:1/0?password_file=/no&x=1", "redis://u@h?password_file=/dev/null",
        ])) {
            if let Err(error) = with_passwords(&url) {
                let told = shown(&error);
                let secret = url.contains(":sekret@") && url.matches("sekret").count() == 1;
                proptest::prop_assert!(!secret || !told.contains("sekret"), "{}", told);
            }
        }
    }
}
