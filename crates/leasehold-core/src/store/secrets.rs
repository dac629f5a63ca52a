//! Secrets in files, which keep them out of command lines: the password of a URL, or a whole URL.
//!
//! `password_file=PATH` is resolved here, before a store sees its URL, so it works for every store
//! whose URL has a password. The file is read each time that the store is opened. A store that
//! connects with a [`Password`] reads it again for each connection, so that the password can be
//! changed while clients run. The URL of such a store keeps the parameter. One line end after the
//! secret is not part of it.
//!
//! A file that all users of the machine may read is accepted, because a container's secrets often
//! have such permissions. [`public_secrets`] reports it.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, LazyLock};

use crate::types::doctor::Finding;
use crate::types::error::{Error, ErrorKind, Result};
use crate::util::percent::{ENCODING_HINT, Escaped, decoded};

/// The environment variables that name a store.
const STORE: &str = "LEASEHOLD_STORE";
const STORE_FILE: &str = "LEASEHOLD_STORE_FILE";
/// The default of `--store` if a file contains the URL. It is shown in errors.
const IN_FILE: &str = "$LEASEHOLD_STORE_FILE";
/// The parameter that names the file with the password.
pub(crate) const PASSWORD_FILE: &str = "password_file";
/// The parameters that name a file, each with the parameter that it replaces.
const PARAMETERS: [(&str, &str); 3] = [
    (PASSWORD_FILE, "password"),
    ("sentinel_password_file", "sentinel_password"),
    ("token_file", "token"),
];
/// The longest secret, in bytes.
const LONGEST: u64 = 64 * 1024;
/// Schemes of URLs without a password. Text that looks like parameters may be part of a path.
const WITHOUT: [&str; 6] = ["file", "memory", "sqlite", "s3", "gs", "az"];

/// The schemes, up to a `+`, of stores that read the file again for each connection.
const READ_AGAIN: [&str; 20] = [
    "http",
    "https",
    "redis",
    "rediss",
    "valkey",
    "valkeys",
    "redlock",
    "redlocks",
    "etcd",
    "etcds",
    "nats",
    "natss",
    "memcached",
    "memcacheds",
    "zookeeper",
    "zookeepers",
    "postgres",
    "postgresql",
    "mysql",
    "mariadb",
];

/// A password. If it is in a file, each connection reads the file again.
///
/// While the password is being changed, either the server or the file has the new one first. So a
/// server may reject a password that a server of this store accepted before. That rejection is
/// transient, because the file will contain the right password later. All clones share whether the
/// password was accepted.
#[derive(Clone)]
pub struct Password {
    text: String,
    file: Option<PathBuf>,
    was_accepted: Arc<AtomicBool>,
}

impl Password {
    /// Creates a password that `file` contained when the store was opened, or that is in no file.
    pub fn new(text: String, file: Option<PathBuf>) -> Self {
        Self { text, file, was_accepted: Arc::default() }
    }

    /// Records that a server accepted the password.
    pub fn accepted(&self) {
        self.was_accepted.store(true, Relaxed);
    }

    /// Returns whether a rejection is transient: a server accepted the password before, and it is
    /// in a file that can contain another one later.
    pub fn is_changeable(&self) -> bool {
        self.file.is_some() && self.was_accepted.load(Relaxed)
    }

    /// Returns the error for a rejection: a transient one if the password [can
    /// change](Self::is_changeable), and otherwise `error`. `server` names the kind of server.
    pub fn rejected(&self, server: &str, error: Error) -> Error {
        match self.is_changeable() {
            true => Self::outdated(server).with_source(error.reason()),
            false => error,
        }
    }

    /// Returns the error for a rejection that is transient.
    pub fn outdated(server: &str) -> Error {
        let what = format!("{server} rejects the password that it accepted before");
        Error::new(ErrorKind::Unreachable, what)
            .with_hint("write the new password into the file that password_file= names")
    }

    /// Returns the password for a new connection. If the file cannot be read, this is the password
    /// that the file contained when the store was opened.
    pub fn now(&self) -> String {
        let read = self.file.as_deref().and_then(|file| read(PASSWORD_FILE, file).ok());
        read.unwrap_or_else(|| self.text.clone())
    }
}

impl PartialEq for Password {
    fn eq(&self, other: &Self) -> bool {
        (&self.text, &self.file) == (&other.text, &other.file)
    }
}

impl Eq for Password {}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Password").finish_non_exhaustive()
    }
}

/// Returns the URL with the passwords in place of the parameters that name their files. If
/// [`store_url`] could not read the file that contains the URL, that file is read again.
///
/// # Errors
/// - [`Config`](ErrorKind::Config): a file cannot be read, is empty or is not text, or the URL has
///   a password as well.
pub fn with_passwords(url: &str) -> Result<Cow<'_, str>> {
    resolved(url, &[])
}

/// Like [`with_passwords`], for opening a store. The URL of a store that reads the files again
/// keeps the parameters.
pub(crate) fn for_opening(url: &str) -> Result<Cow<'_, str>> {
    resolved(url, &READ_AGAIN)
}

fn resolved<'a>(url: &'a str, read_again: &[&str]) -> Result<Cow<'a, str>> {
    if let Some(read) = in_file(url) {
        return Ok(Cow::Owned(resolved(&read?, read_again)?.into_owned()));
    }
    let Some((scheme, base, query)) = parts(url) else { return Ok(Cow::Borrowed(url)) };
    let is_file = |pair: &&str| file_of(pair).is_some();
    if !query.split('&').any(|pair| is_file(&pair)) {
        return Ok(Cow::Borrowed(url));
    }
    let (mut base, mut kept) = (base.to_owned(), Vec::new());
    let is_read_again = read_again.contains(&scheme.split('+').next().unwrap_or_default());
    for pair in query.split('&') {
        let Some((parameter, replaced, path)) = file_of(pair) else {
            kept.push(pair.to_owned());
            continue;
        };
        let path = decoded(path, |_| true).ok_or_else(|| {
            Error::new(ErrorKind::Config, format!("invalid percent-encoding in {parameter}"))
                .with_hint(ENCODING_HINT)
        })?;
        let secret = read(parameter, Path::new(&path))?;
        let secret = Escaped(&secret).to_string();
        if is_read_again {
            kept.push(pair.to_owned());
        }
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

/// Returns the scheme, the text before the parameters, and the parameters, of a URL that may have a
/// password.
fn parts(url: &str) -> Option<(&str, &str, &str)> {
    let (scheme, rest) = url.split_once("://").filter(|(scheme, _)| !WITHOUT.contains(scheme))?;
    // A ? before the last @ is part of a password, and the store rejects such a URL.
    let (base, query) = rest.split_once('?').filter(|(_, query)| !query.contains('@'))?;
    Some((scheme, base, query))
}

/// Returns the parameter, the one that it replaces, and the path, if `pair` is a parameter that
/// names a file.
fn file_of(pair: &str) -> Option<(&'static str, &'static str, &str)> {
    let (key, path) = pair.split_once('=')?;
    let (parameter, replaced) = PARAMETERS.into_iter().find(|(known, _)| *known == key)?;
    Some((parameter, replaced, path))
}

/// Returns `base`, the text of a URL between scheme and parameters, with this password before the
/// hosts, or `None` if the URL names no host.
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
    // NATS expects its token in place of the user.
    let before =
        if ["nats", "natss"].contains(&scheme) && credentials.is_empty() { "" } else { ":" };
    Ok(Some(format!("{credentials}{before}{secret}@{rest}")))
}

/// Returns the secret in a file. `named_by` is the parameter or variable that names the file.
fn read(named_by: &str, path: &Path) -> Result<String> {
    let refused = |what: &str, hint: &str| {
        let what = format!("cannot use {named_by}={path:?}: {what}");
        Error::new(ErrorKind::Config, what).with_hint(hint)
    };
    // Reading a FIFO could block forever.
    if std::fs::metadata(path).is_ok_and(|file| !file.is_file()) {
        return Err(refused("it is not a regular file", "write the secret into a regular file"));
    }
    let read = std::fs::File::open(path).and_then(|file| {
        use std::io::Read;
        let mut bytes = Vec::new();
        file.take(LONGEST + 1).read_to_end(&mut bytes).map(|_| bytes)
    });
    let bytes = read.map_err(|why| {
        refused(&why.to_string(), "use the absolute path of a file that this user may read")
    })?;
    if bytes.len() as u64 > LONGEST {
        return Err(refused("the file is too long", "put only the secret into the file"));
    }
    let text = String::from_utf8(bytes).map_err(|_| {
        refused("the file is not UTF-8 text", "write the secret into the file as UTF-8 text")
    })?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    match text {
        "" => Err(refused("the file is empty", "write the secret into the file")),
        text if text.contains(char::is_control) => Err(refused(
            "the file contains a line break or another control character",
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

/// Returns the default of an option `--store`, for [`store_url`]: the store that the environment
/// names, or `file:`. An empty variable counts as unset, as in other programs.
pub fn default_store() -> &'static OsStr {
    static DEFAULT: LazyLock<OsString> = LazyLock::new(|| match named() {
        none if none.is_empty() => "file:".into(),
        store => store,
    });
    &DEFAULT
}

/// Returns the default of an option `--namespace`: `LEASEHOLD_NAMESPACE`, or no prefix.
///
/// clap does not read the variable, because it would show the option in usage lines as if it were
/// required.
pub fn default_namespace() -> &'static OsStr {
    static DEFAULT: LazyLock<OsString> =
        LazyLock::new(|| std::env::var_os("LEASEHOLD_NAMESPACE").unwrap_or_default());
    &DEFAULT
}

/// Returns the store that the environment names: a URL, or the marker for a URL in a file.
fn named() -> OsString {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    set(STORE).or_else(|| set(STORE_FILE).map(|_| IN_FILE.into())).unwrap_or_default()
}

/// Returns the store's URL for a value of `--store`. If the URL is in a file that cannot be used,
/// the value itself is returned, and opening the store reports the reason. (clap parses an option's
/// default even if the option was given, so an error here could be about a value that is not used.)
///
/// # Errors
/// The message for clap, if the value is empty: a script's variable may be unset, and each machine
/// would then use its own locks.
pub fn store_url(value: &str) -> std::result::Result<String, &'static str> {
    match value {
        "" => Err("the URL is empty; is the variable set? For this machine's locks, use file:"),
        value => Ok(in_file(value).and_then(Result::ok).unwrap_or_else(|| value.to_owned())),
    }
}

/// Returns the URL in the file, if `value` is the marker for it.
fn in_file(value: &str) -> Option<Result<String>> {
    let path = std::env::var_os(STORE_FILE).filter(|_| value == IN_FILE)?;
    Some(read(STORE_FILE, Path::new(&path)))
}

/// Returns findings about the files with this URL's secrets, for the doctor.
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

/// A path, quoted for a shell.
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

    #[test]
    fn stores_that_reread_the_password_file_keep_its_parameter() {
        let secret = file(b"x");
        let path = secret.display();
        for (url, whole) in [
            ("redis+cluster://h?FILE", "redis+cluster://:x@h?FILE"),
            ("nats://h/bucket?FILE&create=no", "nats://x@h/bucket?FILE&create=no"),
            ("redis+unix:///s?FILE", "redis+unix:///s?FILE&password=x"),
            ("postgres://u@h/d?FILE", "postgres://u:x@h/d?FILE"),
            ("own://u@h/d?FILE", "own://u:x@h/d"),
        ] {
            let [url, whole] =
                [url, whole].map(|u| u.replace("FILE", &format!("password_file={path}")));
            assert_eq!(for_opening(&url).unwrap(), whole, "{url}");
        }
    }

    #[test]
    fn server_token_is_added_beside_its_file_name() {
        let secret = file(b"x\n");
        for url in ["http://h/", "https://h1,h2/base", "http+unix:///a/socket"] {
            let url = format!("{url}?token_file={}", secret.display());
            assert_eq!(for_opening(&url).unwrap(), format!("{url}&token=x"));
        }
    }

    #[test]
    fn password_is_read_again_for_each_connection() {
        let secret = file(b"old\n");
        let password = Password::new("old".into(), Some(secret.to_path_buf()));
        std::fs::write(&secret, "new\n").unwrap();
        assert_eq!(password.now(), "new");
        // An orchestrator may replace the file in this way.
        std::fs::remove_file(&secret).unwrap();
        assert_eq!(password.now(), "old");
        assert!(!format!("{password:?}").contains("old"), "{password:?}");
    }

    #[test]
    fn rejection_is_transient_once_a_server_accepted_a_password_from_a_file() {
        let denied = || Error::new(ErrorKind::Denied, "WRONGPASS");
        let secret = file(b"old\n");
        let in_file = Password::new("old".into(), Some(secret.to_path_buf()));
        let in_url = Password::new("old".into(), None);
        in_url.accepted();
        for (password, kind) in [(&in_file, ErrorKind::Denied), (&in_url, ErrorKind::Denied)] {
            assert_eq!(password.rejected("Redis", denied()).kind(), kind);
        }
        // This is a connection to another server of the same store.
        in_file.clone().accepted();
        let error = in_file.rejected("Redis", denied());
        assert!(error.is_transient(), "{error}");
        let message = shown(&error);
        assert!(message.contains("Redis rejects") && message.contains("WRONGPASS"), "{message}");
    }

    fn shown(error: &Error) -> String {
        format!("{error:#}")
    }

    #[test]
    fn password_from_a_file_is_inserted_into_the_url() {
        let secret = file(b"p@s:s/%\n");
        let path = secret.display();
        for (url, whole) in [
            ("redis://h:1/0?a=b&FILE&c=d", "redis://:p%40s%3As%2F%25@h:1/0?a=b&c=d"),
            ("postgres://u%40x@h/d?FILE", "postgres://u%40x:p%40s%3As%2F%25@h/d"),
            ("etcd://u@a,b,c?FILE", "etcd://u:p%40s%3As%2F%25@a,b,c"),
            ("nats://u@h?FILE", "nats://u:p%40s%3As%2F%25@h"),
            ("nats://h/bucket?FILE", "nats://p%40s%3As%2F%25@h/bucket"),
            ("natss://h/bucket?FILE", "natss://p%40s%3As%2F%25@h/bucket"),
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
    fn other_urls_are_unchanged() {
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
    fn invalid_password_file_is_rejected_by_name() {
        let refused = |text: &[u8], expected: &str| {
            let secret = file(text);
            let url = format!("redis://h?password_file={}", secret.display());
            let error = with_passwords(&url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            let message = shown(&error);
            assert!(
                message.contains(expected) && message.contains(secret.to_str().unwrap()),
                "{message}"
            );
            assert!(!message.contains("sekret") && message.lines().count() == 1, "{message}");
        };
        refused(b"", "is empty");
        refused(b"\n", "is empty");
        refused(b"sekret\nsekret\n", "a line break");
        refused(b"sekret\xff", "not UTF-8");
        refused("sekret".repeat(20_000).as_bytes(), "too long");
        let message = shown(&with_passwords("redis://h?password_file=/no/file").unwrap_err());
        assert!(message.contains("password_file=\"/no/file\": No such file"), "{message}");
        let secret = file(b"sekret");
        let both = format!("redis://u:sekret@h?password_file={}", secret.display());
        let message = shown(&with_passwords(&both).unwrap_err());
        assert!(message.contains("both") && !message.contains("sekret"), "{message}");
    }

    #[test]
    fn world_readable_secret_file_is_reported() {
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
        fn errors_for_arbitrary_urls_show_no_secret(url in testbed::texts(&[
            "redis://u:sekret@h:1/0?password_file=/no&x=1", "redis://u@h?password_file=/dev/null",
        ])) {
            if let Err(error) = with_passwords(&url) {
                let message = shown(&error);
                let secret = url.contains(":sekret@") && url.matches("sekret").count() == 1;
                proptest::prop_assert!(!secret || !message.contains("sekret"), "{}", message);
            }
        }
    }
}
