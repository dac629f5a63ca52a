//! Store URLs: the common parts, and how a URL is shown without its credentials.

pub(crate) mod parts;
pub(crate) mod tls;

use crate::types::error::{Error, ErrorKind, Result};

/// Returns the URL without user, password and parameter values, for printing.
pub fn redacted(url: &str) -> String {
    let shown: String = url.chars().filter(|c| !c.is_control()).collect();
    let is_scheme = |(scheme, _): &(&str, &str)| {
        scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
    };
    // Cut only the end. Cutting earlier could remove the @ that ends a long password.
    let cut = |text: String| text.chars().take(200).collect::<String>();
    let (rest, query) = match shown.split_once('?') {
        // A file: path may contain a ?, and has no password. A password may contain an unencoded ?.
        _ if shown.starts_with("file:") => return cut(shown),
        // Any part of this may belong to the password.
        Some((rest, query)) if rest.contains('@') && query.contains('@') => {
            let scheme = rest.split_once("://").filter(is_scheme);
            return scheme.map_or("***".to_owned(), |(scheme, _)| cut(format!("{scheme}://***")));
        }
        Some((rest, query)) if !query.contains('@') => (rest, query),
        _ => (shown.as_str(), ""),
    };
    let is_word = |key: &&str| {
        !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let keys: Vec<String> = query
        .split('&')
        .filter_map(|pair| pair.split('=').next().filter(is_word))
        // Whether a client may create the store is not a part of the store's name.
        .filter(|key| *key != "create")
        .map(|key| format!("{key}=…"))
        .collect();
    let query = if keys.is_empty() { String::new() } else { format!("?{}", keys.join("&")) };
    let Some((scheme, rest)) = rest.split_once("://").filter(is_scheme) else {
        // A mistyped URL may still contain a password.
        return cut(match rest.rsplit_once('@') {
            Some((_, after)) => format!("***@{}{query}", without_values(after)),
            None => format!("{}{query}", without_values(rest)),
        });
    };
    // The last @ of the authority ends the password, which may contain an unencoded @ or /.
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let hidden = if host.len() < rest.len() { "***@" } else { "" };
    let (authority, path) = host.split_at(host.find('/').unwrap_or(host.len()));
    let authority = if authority.split(',').all(shows_no_password) { authority } else { "***" };
    cut(format!("{scheme}://{hidden}{authority}{}{query}", without_values(path)))
}

/// Returns the text without the values of secret parameters. In a mistyped URL, they may follow
/// something other than a `?`.
fn without_values(text: &str) -> String {
    const SECRETS: [&str; 5] = ["password=", "passwd=", "token=", "secret=", "secret_access_key="];
    let mut shown = String::new();
    let mut rest = text;
    while let Some(end) = SECRETS
        .iter()
        .filter_map(|secret| Some(rest.to_ascii_lowercase().find(secret)? + secret.len()))
        .min()
    {
        shown.push_str(&rest[..end]);
        shown.push('…');
        rest = &rest[end..];
        rest = &rest[rest.find(['&', ';', ' ']).unwrap_or(rest.len())..];
    }
    shown + rest
}

/// Returns whether `host:port` can be shown. If the host is missing, the text in place of the port
/// may be a password. Parameters may follow the host after a mistyped `?`.
fn shows_no_password(host: &str) -> bool {
    let is_port = |port: &str| port.chars().all(|c| c.is_ascii_digit());
    !host.contains(['&', ';', '#', '=', ' '])
        && host.rsplit_once(':').is_none_or(|(before, port)| before.ends_with(']') || is_port(port))
}

/// Splits a URL, or what follows its `://`, at the `?` before the parameters.
///
/// A password may contain an unencoded `?`. The text after it would be parsed as parameters and
/// shown in errors, so such a URL is rejected. An `@` in a parameter is rejected too, because it
/// looks the same.
///
/// # Errors
/// - [`Config`](ErrorKind::Config): an `@` follows the first `?`.
pub fn split_query(rest: &str) -> Result<(&str, &str)> {
    let Some((base, query)) = rest.split_once('?') else { return Ok((rest, "")) };
    if query.contains('@') {
        let what = "invalid store URL: an \"@\" after the first \"?\" is ambiguous";
        let hint = "percent-encode the ? in the password as %3F, or the @ in a parameter as %40";
        return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
    }
    Ok((base, query))
}

#[cfg(test)]
mod tests {
    use super::*;

    // S94
    #[test]
    fn credentials_are_never_shown() {
        for (url, shown) in [
            ("redis://user:secret@h:1/0?x=secret&y", "redis://***@h:1/0?x=…&y=…"),
            ("redis://:se@cr/et@h:1", "redis://***@h:1"),
            ("etcd://a,b,c", "etcd://a,b,c"),
            ("postgres://h/d?create=no", "postgres://h/d"),
            ("nats://h/b?create=no&prefix=a", "nats://h/b?prefix=…"),
            ("file:/tmp/x", "file:/tmp/x"),
            ("postgres:user:secret@h/d", "***@h/d"),
            ("memory:\nforged", "memory:forged"),
            ("postgres:/h/d?password=hush", "postgres:/h/d?password=…"),
            ("zookeeper://u:p?ss@h", "zookeeper://***@h"),
            ("redis://u:p@h?x=1&se@cret", "redis://***"),
            ("redis://app:hush@2secret?x=1@cache/", "redis://***"),
            ("http://h/&token=secret", "http://h/&token=…"),
            ("http://h&token=secret", "http://***"),
            ("etcd://a,h#password=secret/x", "etcd://***/x"),
            ("secret@host?user=me@x", "***"),
            ("mysql://h/d;password=secret;x=1", "mysql://h/d;password=…;x=1"),
            ("postgres://h/d#Password=secret", "postgres://h/d#Password=…"),
            ("host=db password=secret dbname=x", "host=db password=… dbname=x"),
            ("file:/tmp/a?b=c", "file:/tmp/a?b=c"),
            ("redis://u:secret", "redis://***"),
            ("redis://u:secret/0?a=b", "redis://***/0?a=…"),
            ("redis://[::1]:7,h:8/0", "redis://[::1]:7,h:8/0"),
            ("redis:0//u:secret@h:redis://u:secret@h", "***@h"),
        ] {
            assert_eq!(redacted(url), shown);
        }
        let long = "secret".repeat(50);
        assert_eq!(redacted(&format!("postgres://u:{long}@h/d")), "postgres://***@h/d");
    }

    // S94
    #[test]
    fn question_mark_in_a_password_does_not_start_the_query() {
        assert_eq!(split_query("u:p@h/0?a=b&c").unwrap(), ("u:p@h/0", "a=b&c"));
        assert_eq!(split_query("h").unwrap(), ("h", ""));
        for url in ["u:secret?secret@h/", "u:secret@secret?secret=1@h/"] {
            let error = split_query(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            let text = error.report().to_string();
            assert!(text.contains("%3F") && !text.contains("secret"), "{text}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        // S94
        #[test]
        fn redacted_url_is_one_short_line_without_its_password(url in testbed::texts(&[
            "redis://u:sekret@h:1/0?x=1&y=2", "postgres://u:sekret@h/d?token_offset=7", "file:/a/b",
        ])) {
            let shown = redacted(&url);
            proptest::prop_assert!(shown.lines().count() <= 1 && shown.chars().count() <= 200);
            // `redacted` removes control characters.
            let url: String = url.chars().filter(|c| !c.is_control()).collect();
            let secret = url.contains("://u:sekret@") && url.matches("sekret").count() == 1;
            proptest::prop_assert!(!secret || !shown.contains("sekret"), "{}", shown);
        }
    }
}
