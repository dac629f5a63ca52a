//! Which store a URL's scheme names, as a plain value: whoever puts a program together fills it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tokio::runtime::Handle;

use crate::store::{MemoryStore, Store};
use crate::words::error::{Error, ErrorKind, Result};

/// A store that is being opened.
pub type Opening = Pin<Box<dyn Future<Output = Result<Arc<dyn Store>>> + Send>>;

/// Opens the store of a URL. What the store does in the background belongs on this runtime, which is
/// the client's own and outlives the caller's. Errors need not name the URL.
pub type Opener = fn(url: String, runtime: Handle) -> Opening;

/// Which store opens which URLs. The default knows `memory:` alone.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::sync::Arc;
/// use leasehold::store::{MemoryStore, Store};
/// use leasehold::{Builder, Registry};
/// // Every connection finds a namespace of its own.
/// let registry = Registry::default().with("apart", &["apart"], |_url, _runtime| {
///     Box::pin(async { Ok(Arc::new(MemoryStore::new()) as Arc<dyn Store>) })
/// });
/// let locks = Builder::new(registry).connect("apart:").await?;
/// # drop(locks); Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct Registry {
    stores: Vec<Known>,
}

#[derive(Clone)]
struct Known {
    name: &'static str,
    schemes: &'static [&'static str],
    /// `None`: the build leaves it out.
    open: Option<Opener>,
}

impl Default for Registry {
    fn default() -> Self {
        Self { stores: Vec::new() }.with("memory", &["memory"], |url, _| {
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
    /// Adds a store: `name` is what people are told of when they ask for one that is not here,
    /// `schemes` are what its URLs begin with. A scheme that is given with a `+` at its end may have
    /// more after it: `redis+` is `redis:` and `redis+sentinel:`. The first store that has a scheme
    /// keeps it.
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

    /// Adds a store that this build leaves out: who asks for it is told of the feature that has it.
    #[must_use]
    pub fn without(mut self, feature: &'static str, schemes: &'static [&'static str]) -> Self {
        self.stores.push(Known { name: feature, schemes, open: None });
        self
    }

    /// The names of the stores that it can open.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.stores.iter().filter(|known| known.open.is_some()).map(|known| known.name)
    }

    pub(crate) async fn open(&self, url: &str, runtime: &Handle) -> Result<Arc<dyn Store>> {
        let refused = |kind, what: String| Err(Error::new(kind, what));
        let Some((scheme, _)) = url.split_once(':') else {
            let what = "a store is named by a URL, such as file: or memory:".to_owned();
            return refused(ErrorKind::Config, what);
        };
        let Some(known) = self.stores.iter().find(|known| known.has(scheme)) else {
            let names: Vec<&str> = self.names().collect();
            let what = format!("no such store: this build has {}", names.join(": and ") + ":");
            return refused(ErrorKind::Config, what);
        };
        let Some(open) = known.open else {
            let what = format!("this build leaves out the feature `{}`: enable it", known.name);
            return refused(ErrorKind::Unsupported, what);
        };
        open(url.to_owned(), runtime.clone()).await
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
    fn a_plus_stands_for_what_may_follow() {
        let known = Known { name: "redis", schemes: &["redis+", "redlock"], open: None };
        for scheme in ["redis", "redis+sentinel", "redlock"] {
            assert!(known.has(scheme), "{scheme}");
        }
        for scheme in ["rediss", "redlock+x", "", "+", "memory"] {
            assert!(!known.has(scheme), "{scheme}");
        }
    }

    #[test]
    fn what_is_not_here_is_told_by_name() {
        let registry = Registry::default().without("etcd", &["etcd", "etcds"]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let told = |url| {
            let error = runtime.block_on(registry.open(url, runtime.handle())).unwrap_err();
            (error.kind(), error.to_string())
        };
        let (kind, text) = told("etcds://a");
        assert_eq!(kind, ErrorKind::Unsupported);
        assert!(text.contains("leaves out the feature `etcd`"), "{text}");
        let (kind, text) = told("ftp://a");
        assert_eq!(kind, ErrorKind::Config);
        assert!(text.ends_with("this build has memory:"), "{text}");
        assert_eq!(told("nothing").0, ErrorKind::Config);
    }
}
