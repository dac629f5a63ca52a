//! Opens the store at a URL, and applies the parameter `token_offset`, which all stores except
//! `file:` and `memory:` accept.

use std::borrow::Cow;
use std::sync::Arc;

use tokio::runtime::Handle;

use super::Store;
use super::registry::Registry;
use super::secrets::for_opening;
use super::token_offset::with_token_offset;
use super::url::parts::is_word;
use super::url::redacted;
use crate::types::error::{Error, ErrorKind, Result};

/// Opens the store at `url`. Reads passwords from the files named in the URL, and raises all tokens
/// by the URL's `token_offset`, if it has one.
pub(crate) async fn open(
    url: &str,
    registry: &Registry,
    runtime: &Handle,
) -> Result<Arc<dyn Store>> {
    let shown = redacted(url);
    let with_context = |e: Error| e.with_operation("connect").with_store(&shown);
    let url = for_opening(url).map_err(with_context)?;
    let (url, offset) = token_offset(&url).map_err(with_context)?;
    let plain = redacted(&url);
    let opened = registry.open(&url, runtime).await;
    let store = opened.map_err(|e| e.with_operation("connect").with_store(&plain))?;
    with_token_offset(store, offset).map_err(with_context)
}

/// Separates the parameter `token_offset` from the others. Returns the URL without it, and its
/// value or 0. URLs of `file:` and `memory:` are returned unchanged, because a `file:` path may
/// contain a `?`, and `memory:` takes no parameters.
fn token_offset(url: &str) -> Result<(Cow<'_, str>, u64)> {
    const KEY: &str = "token_offset=";
    let refused = |what: &str| Err(Error::new(ErrorKind::Config, what));
    let Some((base, query)) = url.rsplit_once('?') else { return Ok((url.into(), 0)) };
    // An @ after the ? may belong to an unencoded password. The store reports that.
    if url.starts_with("file:") || url.starts_with("memory:") || query.contains('@') {
        return Ok((url.into(), 0));
    }
    let (ours, others): (Vec<&str>, Vec<&str>) =
        query.split('&').partition(|pair| pair.starts_with(KEY));
    let offset = match ours[..] {
        [] => return Ok((url.into(), 0)),
        [one] => one[KEY.len()..].parse(),
        _ => return refused("URL parameter \"token_offset\" is given more than once"),
    };
    let Ok(offset) = offset else {
        let value = Some(&ours[0][KEY.len()..]).filter(|value| is_word(value));
        let value = value.map(|value| format!(" {value:?}")).unwrap_or_default();
        return refused(&format!("invalid token_offset{value}: expected a number"));
    };
    let rest = match others[..] {
        [] => base.to_owned(),
        _ => format!("{base}?{}", others.join("&")),
    };
    Ok((rest.into(), offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    // F24
    #[test]
    fn token_offset_is_removed_from_the_store_url() {
        for (url, rest, offset) in [
            ("etcd://a,b", "etcd://a,b", 0),
            ("etcd://a,b?token_offset=7", "etcd://a,b", 7),
            ("etcds://u:p@a/x?ca=/f&token_offset=7&y=1", "etcds://u:p@a/x?ca=/f&y=1", 7),
            ("redis://u:p?q@h?token_offset=8", "redis://u:p?q@h", 8),
            ("file:/a?token_offset=7", "file:/a?token_offset=7", 0),
            ("redis://u:p?token_offset=7@h", "redis://u:p?token_offset=7@h", 0),
        ] {
            assert_eq!(token_offset(url).unwrap(), (rest.into(), offset), "{url}");
        }
        for bad in [
            "etcd://a?token_offset=",
            "etcd://a?token_offset=-1",
            "etcd://a?token_offset=1&token_offset=2",
        ] {
            assert_eq!(token_offset(bad).unwrap_err().kind(), ErrorKind::Config, "{bad}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn removing_the_token_offset_never_lengthens_the_url(url in testbed::texts(&[
            "redis://u:p@h/0?a=b&token_offset=7", "file:/a?token_offset=7",
        ])) {
            if let Ok((rest, _)) = token_offset(&url) {
                proptest::prop_assert!(rest.len() <= url.len());
            }
        }
    }
}
