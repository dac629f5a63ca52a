//! The stores of a program, by the schemes of their URLs.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tokio::runtime::Handle;

use crate::store::features::{feature_hint, hinted_feature};
use crate::store::url::redacted;
use crate::store::{MemoryStore, Store};
use crate::types::error::{Error, ErrorKind, Result};
use crate::util::similar::did_you_mean;

/// A store that is being opened.
pub type Opening = Pin<Box<dyn Future<Output = Result<Arc<dyn Store>>> + Send>>;

/// Opens the store of a URL.
///
/// Background tasks of the store must run on this runtime, which belongs to the client and outlives
/// the caller's. Errors need not contain the URL.
pub type Opener = fn(url: String, runtime: Handle) -> Opening;

/// Opens stores by the scheme of their URL. The default knows only `memory:`.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::sync::Arc;
/// use leasehold::store::{MemoryStore, Registry, Store};
/// use leasehold::Builder;
/// // Each connection has locks of its own.
/// let registry = Registry::default().with("apart", &["apart"], |_url, _runtime| {
///     Box::pin(async { Ok(Arc::new(MemoryStore::new()) as Arc<dyn Store>) })
/// });
/// let locks = Builder::new(registry).connect("apart:").await?;
/// # drop(locks); Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct Registry {
    stores: Vec<Known>,
    feature_hint: fn(&str) -> String,
}

#[derive(Clone)]
struct Known {
    name: &'static str,
    schemes: &'static [&'static str],
    /// `None` if the store is not compiled in.
    open: Option<Opener>,
}

impl Default for Registry {
    fn default() -> Self {
        Self { stores: Vec::new(), feature_hint }.with("memory", &["memory"], |url, _| {
            Box::pin(async move { Ok(MemoryStore::connect(&url)? as Arc<dyn Store>) })
        })
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |known: &Known| (known.name, known.open.is_some());
        f.debug_map().entries(self.stores.iter().map(shown)).finish()
    }
}

impl Registry {
    /// Adds a store.
    ///
    /// Errors about unknown schemes list the store's `name`. The store's URLs begin with one of
    /// `schemes`. A scheme that ends in `+` allows a suffix: `redis+` matches `redis:` and
    /// `redis+sentinel:`. If two stores have the same scheme, the one that was added first opens
    /// it.
    #[must_use]
    pub fn with(
        mut self,
        name: &'static str,
        schemes: &'static [&'static str],
        open: Opener,
    ) -> Self {
        self.stores.push(Known { name, schemes, open: Some(open) });
        self
    }

    /// Adds a store that is not compiled in. The error for its URLs names the Cargo feature that
    /// enables it.
    #[must_use]
    pub fn without(mut self, feature: &'static str, schemes: &'static [&'static str]) -> Self {
        self.stores.push(Known { name: feature, schemes, open: None });
        self
    }

    /// Replaces the hint of the error for a store that is not compiled in. `hint` gets the name of
    /// the Cargo feature.
    ///
    /// By default, the hint is for programs that use the library. A program that is installed with
    /// `cargo install` has its own command:
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use leasehold::store::Registry;
    /// use leasehold::{Builder, ErrorKind};
    /// let registry = Registry::default()
    ///     .without("redis", &["redis+"])
    ///     .feature_hint(|feature| format!("cargo install my-program --features {feature}"));
    /// let error = Builder::new(registry).connect("redis://localhost").await.unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Unsupported);
    /// assert_eq!(error.hint(), Some("cargo install my-program --features redis"));
    /// # });
    /// ```
    #[must_use]
    pub fn feature_hint(mut self, hint: fn(&str) -> String) -> Self {
        self.feature_hint = hint;
        self
    }

    /// Returns the Cargo feature that would enable the store of this URL, if the scheme is known
    /// but the store is not compiled in.
    pub fn missing_feature(&self, url: &str) -> Option<&'static str> {
        let (scheme, _) = url.split_once(':')?;
        let known = self.stores.iter().find(|known| known.has(scheme))?;
        known.open.is_none().then_some(known.name)
    }

    /// Returns the names of the stores that can be opened.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.stores.iter().filter(|known| known.open.is_some()).map(|known| known.name)
    }

    pub(crate) async fn open(&self, url: &str, runtime: &Handle) -> Result<Arc<dyn Store>> {
        let Some((scheme, _)) = url.split_once(':') else {
            let what = format!("invalid store URL {:?}: missing scheme", redacted(url));
            let hint = match url.starts_with('/') {
                true => format!("for a directory on this machine: file:{}", url.escape_debug()),
                false => self.suggestion(url),
            };
            return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        };
        let Some(known) = self.stores.iter().find(|known| known.has(scheme)) else {
            // If `redacted` hides the text before the first colon, that text may be a secret.
            let what = match redacted(url).starts_with(scheme) {
                true => format!("unknown store \"{}:\"", scheme.escape_debug()),
                false => format!("invalid store URL {:?}: unknown scheme", redacted(url)),
            };
            return Err(Error::new(ErrorKind::Config, what).with_hint(self.suggestion(scheme)));
        };
        let Some(open) = known.open else {
            let what = format!("leasehold was built without the store {scheme}:");
            let hint = (self.feature_hint)(known.name);
            return Err(Error::new(ErrorKind::Unsupported, what).with_hint(hint));
        };
        let opened = open(url.to_owned(), runtime.clone()).await;
        // Stores know only the library's own hint (for TLS), so it is replaced here.
        opened.map_err(|error| match error.hint().and_then(hinted_feature) {
            Some(feature) => {
                let hint = (self.feature_hint)(feature);
                error.with_hint(hint)
            }
            None => error,
        })
    }

    /// Returns the hint for an unknown scheme.
    fn suggestion(&self, scheme: &str) -> String {
        let names: Vec<&str> = self.names().collect();
        let supported = format!("this build supports {}:", names.join(":, "));
        let all = self.stores.iter().flat_map(|known| known.schemes);
        match did_you_mean(scheme, all.map(|scheme| scheme.trim_end_matches('+'))) {
            Some(meant) => format!("did you mean \"{meant}:\"? ({supported})"),
            None => supported,
        }
    }
}

impl Known {
    fn has(&self, scheme: &str) -> bool {
        let before_plus = scheme.split_once('+').map_or(scheme, |(before, _)| before);
        self.schemes.iter().any(|ours| match ours.strip_suffix('+') {
            Some(ours) => ours == before_plus,
            None => *ours == scheme,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheme_ending_in_plus_matches_its_variants() {
        let known = Known { name: "redis", schemes: &["redis+", "redlock"], open: None };
        for scheme in ["redis", "redis+sentinel", "redlock"] {
            assert!(known.has(scheme), "{scheme}");
        }
        for scheme in ["rediss", "redlock+x", "", "+", "memory"] {
            assert!(!known.has(scheme), "{scheme}");
        }
    }

    #[test]
    fn unknown_and_disabled_stores_give_different_errors() {
        let registry = Registry::default().without("etcd", &["etcd", "etcds"]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let shown = |registry: &Registry, url| {
            let error = runtime.block_on(registry.open(url, runtime.handle())).unwrap_err();
            (error.kind(), error.reason(), error.hint().unwrap_or_default().to_owned())
        };
        for (url, kind, cause, hint) in [
            (
                "etcds://a",
                ErrorKind::Unsupported,
                "leasehold was built without the store etcds:",
                "enable the feature \"etcd\" of leasehold: cargo add leasehold --features etcd",
            ),
            ("ftp://a", ErrorKind::Config, "unknown store \"ftp:\"", "this build supports memory:"),
            (
                "etdc://a",
                ErrorKind::Config,
                "unknown store \"etdc:\"",
                "did you mean \"etcd:\"? (this build supports memory:)",
            ),
            (
                "memory",
                ErrorKind::Config,
                "invalid store URL \"memory\": missing scheme",
                "did you mean \"memory:\"? (this build supports memory:)",
            ),
            (
                "/var/locks",
                ErrorKind::Config,
                "invalid store URL \"/var/locks\": missing scheme",
                "for a directory on this machine: file:/var/locks",
            ),
            (
                "user:secret@host/db",
                ErrorKind::Config,
                "invalid store URL \"***@host/db\": unknown scheme",
                "this build supports memory:",
            ),
        ] {
            assert_eq!(shown(&registry, url), (kind, cause.into(), hint.into()), "{url}");
        }
        assert_eq!(registry.missing_feature("etcds://a"), Some("etcd"));
        assert_eq!(registry.missing_feature("memory:"), None);
        assert_eq!(registry.missing_feature("etdc://a"), None);
        let registry = registry.feature_hint(|feature| format!("make {feature}"));
        assert_eq!(shown(&registry, "etcd://a").2, "make etcd");
    }
}
