//! Creates clients.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use super::blocking;
use super::client::Client;
use crate::client::background::Background;
use crate::client::core::Core;
use crate::client::telemetry;
use crate::store::namespaced::namespaced;
use crate::store::open::open;
use crate::store::registry::{Opening, Registry};
use crate::store::token_offset::with_token_offset;
use crate::store::{Guarantee, Store};
use crate::types::error::{Error, ErrorKind, Result};
use crate::types::options::LockOptions;
use crate::types::sequencer::MAX_IDENTITY_BYTES;
use crate::util::clock::Clock;

/// The initial and the maximum pause before the next attempt to connect.
const CONNECT_AGAIN: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];

/// One attempt to connect.
type Trying<'a> = Pin<Box<dyn Future<Output = Result<Arc<dyn Store>>> + Send + 'a>>;

/// Connects to a store with options.
///
/// The default registry knows only `memory:`. `leasehold::builder()` knows all stores that are
/// compiled in.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use leasehold::store::Guarantee;
/// let locks = leasehold::builder()
///     .label("billing") // shown to people who inspect the lock
///     .require(Guarantee::Fifo)
///     .connect("memory:")
///     .await?;
/// # drop(locks); Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug, Default)]
pub struct Builder {
    label: String,
    options: LockOptions,
    clock: Clock,
    required: Vec<Guarantee>,
    identity: Option<String>,
    token_offset: u64,
    namespace: String,
    patience: Duration,
    registry: Registry,
}

impl Builder {
    /// Creates a builder for clients of the stores in this registry.
    pub fn new(registry: Registry) -> Self {
        Self { registry, ..Self::default() }
    }

    /// Sets the label of this client's holds, which describes the holder to people. A label set on
    /// a lock takes precedence.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let locks = leasehold::builder().label("web 7").connect("memory:").await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn label(mut self, text: impl Into<String>) -> Self {
        self.label = text.into();
        self
    }

    /// Sets the options with which every lock of this client begins. A lock's methods change single
    /// options, and its [`options`](crate::Mutex::options) replaces all of them.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// let mut short = leasehold::LockOptions::default(); // or read them from your configuration (feature `serde`)
    /// short.lease = Duration::from_secs(5);
    /// let locks = leasehold::builder().options(short).connect("memory:").await?;
    /// let guard = locks.mutex("order:42").lock().await?;
    /// assert!(guard.remaining() <= Duration::from_secs(5));
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn options(mut self, options: LockOptions) -> Self {
        self.options = options;
        self
    }

    /// Requires a guarantee: connecting to a store without it returns
    /// [`Unsupported`](ErrorKind::Unsupported).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use leasehold::store::Guarantee;
    /// // An error if a restart of the server could allow two holders.
    /// let locks = leasehold::builder().require(Guarantee::ExclusiveOnStoreCrash).connect("memory:").await;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn require(mut self, guarantee: Guarantee) -> Self {
        self.required.push(guarantee);
        self
    }

    /// Sets the identity of the store, which sequencers contain.
    ///
    /// Use it if clients reach one store by different addresses, and set the same identity in all
    /// of them. Together with the [namespace](Self::namespace), the identity has 1 to 1024 bytes
    /// and no control characters. It is not secret.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let locks = leasehold::builder().identity("production").connect("memory:").await?;
    /// let guard = locks.mutex("order:42").lock().await?;
    /// assert_eq!(guard.sequencer().store(), "production");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn identity(mut self, text: impl Into<String>) -> Self {
        self.identity = Some(text.into());
        self
    }

    /// Adds `offset` to all tokens of the store.
    ///
    /// Use an offset when a lock moves here from a store with larger tokens. The resource's fence
    /// has seen those tokens, and would otherwise reject all new holders. Set the offset to at
    /// least the largest of those tokens, in all clients, permanently. In a URL, the parameter is
    /// `token_offset` (not for `file:` and `memory:`). `docs/guide/moving-and-upgrading.md`
    /// describes the steps.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let moved = 1 << 60; // at least the largest token of the previous store
    /// let locks = leasehold::builder().token_offset(moved).connect("memory:").await?;
    /// assert!(locks.mutex("order:42").lock().await?.token().get() > moved);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn token_offset(mut self, offset: u64) -> Self {
        self.token_offset = offset;
        self
    }

    /// Sets how long connecting is retried while the store is unreachable, with pauses of 0.1 s to
    /// 5 s. Default: no retries.
    ///
    /// Use it for a service that starts at the same time as its store. Permanent errors are
    /// returned immediately.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// let patient = leasehold::builder().connect_timeout(Duration::from_secs(60));
    /// let locks = patient.connect("memory:").await?; // or redis://host, which may not be up yet
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn connect_timeout(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sets a prefix for the names of all locks of this client, such as `"acme/"`. The client
    /// itself does not see the prefix.
    ///
    /// Several applications or environments can share one store this way without using each other's
    /// locks. The prefix has at most 256 bytes and no control characters. The maximum length of a
    /// lock name is reduced by the length of the prefix. The prefix is a convention between
    /// clients, not an access control. Use the permissions of the server for that.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let acme = leasehold::builder().namespace("acme/").connect("memory:of-many").await?;
    /// let all = leasehold::connect("memory:of-many").await?;
    /// let _guard = acme.mutex("order:42").lock().await?;
    /// assert!(all.inspect("order:42").await?.is_none());
    /// assert!(all.inspect("acme/order:42").await?.is_some());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn namespace(mut self, prefix: impl Into<String>) -> Self {
        self.namespace = prefix.into();
        self
    }

    /// Sets the clock that measures leases. For tests.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// let clock = leasehold::Clock::stepped();
    /// let locks = leasehold::builder().clock(clock.clone()).connect("memory:").await?;
    /// let guard = locks.mutex("order:42").lease(Duration::from_secs(15)).lock().await?;
    /// clock.advance(Duration::from_secs(16)); // as if the machine had been suspended
    /// assert!(!guard.is_held());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// Connects to the store with this URL.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let locks = leasehold::builder().connect("memory:").await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): the URL is invalid.
    /// - [`Unsupported`](ErrorKind::Unsupported): the store is not compiled in, or does not offer a
    ///   [required](Self::require) guarantee.
    /// - [`Unreachable`](ErrorKind::Unreachable), [`Denied`](ErrorKind::Denied) and other errors of
    ///   the store.
    pub async fn connect(self, url: impl AsRef<str>) -> Result<Client> {
        let background = Background::start()?;
        let url = url.as_ref();
        let open = || Box::pin(open(url, &self.registry, background.handle())) as Trying<'_>;
        let store = background.with_runtime(pin!(self.opened(open, &background))).await?;
        self.start(store, background)
    }

    /// Connects to the store that `open` returns. For stores without a URL.
    ///
    /// `open` receives a handle to the client's runtime, on which the store's background tasks must
    /// run. For a store that is already open, use [`store`](Self::store).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use std::sync::Arc;
    /// use leasehold::store::{MemoryStore, Store};
    /// let locks = leasehold::builder()
    ///     .connect_by(|_runtime| Box::pin(async { Ok(Arc::new(MemoryStore::new()) as Arc<dyn Store>) }))
    ///     .await?;
    /// # drop(locks); Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - The errors of `open`, which is called again if a [retry](Self::connect_timeout) may help.
    /// - All others as for [`connect`](Self::connect).
    pub async fn connect_by(self, open: impl Fn(Handle) -> Opening) -> Result<Client> {
        let background = Background::start()?;
        let open = || open(background.handle().clone()) as Trying<'_>;
        let store = background.with_runtime(pin!(self.opened(open, &background))).await?;
        self.start(store, background)
    }

    /// Connects to the store with this URL, and blocks until it is done. For code without a
    /// runtime.
    ///
    /// ```
    /// let locks = leasehold::builder().label("cron").connect_blocking("memory:")?;
    /// locks.mutex("order:42").lock()?.release()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`connect`](Self::connect).
    pub fn connect_blocking(self, url: impl AsRef<str>) -> Result<blocking::Client> {
        let background = Background::start()?;
        let url = url.as_ref();
        let open = || Box::pin(open(url, &self.registry, background.handle())) as Trying<'_>;
        let store = blocking::block_on(&background, self.opened(open, &background))?;
        self.start(store, background).map(Into::into)
    }

    async fn opened<'a>(
        &self,
        open: impl Fn() -> Trying<'a>,
        background: &Background,
    ) -> Result<Arc<dyn Store>> {
        let (started, [mut pause, longest]) = (self.clock.now(), CONNECT_AGAIN);
        loop {
            let opened = open().await;
            let spent = self.clock.now().since(started);
            match opened {
                Err(error) if error.is_retryable() && spent + pause < self.patience => {}
                done => return done,
            }
            background.sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
    }

    /// Creates a client of a store that is already open.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use std::sync::Arc;
    /// use leasehold::store::MemoryStore; // or a store of your own
    /// let locks = leasehold::builder().label("tests").store(Arc::new(MemoryStore::new()))?;
    /// locks.mutex("order:42").lock().await?.release().await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The same as [`connect`](Self::connect).
    pub fn store(self, store: Arc<dyn Store>) -> Result<Client> {
        self.start(store, Background::start()?)
    }

    /// Creates a client that is one process of a simulation.
    ///
    /// # Errors
    /// The same as [`store`](Self::store).
    #[cfg(feature = "simulation")]
    #[doc(hidden)]
    pub fn simulated(self, store: Arc<dyn Store>, world: &crate::World) -> Result<Client> {
        self.start(store, Background::inside(world.clone()))
    }

    fn start(self, store: Arc<dyn Store>, background: Background) -> Result<Client> {
        telemetry::describe();
        let url = store.url().to_owned();
        // The namespace is added to the identity, even to one that the caller has set. So
        // sequencers of one namespace are rejected in all others.
        let namespace = match &*self.namespace {
            "" => String::new(),
            prefix => format!("#{prefix}"),
        };
        let store =
            with_token_offset(store, self.token_offset).and_then(|s| namespaced(s, self.namespace));
        let store = store.map_err(|e| e.with_operation("connect").with_store(&url))?;
        for wanted in self.required {
            if !store.guarantees().meets(wanted) {
                let what = format!("this store does not guarantee {wanted}");
                return Err(Error::new(ErrorKind::Unsupported, what)
                    .with_hint("use another store, or do not require it")
                    .with_operation("connect")
                    .with_store(store.url()));
            }
        }
        let identity = self.identity.unwrap_or_else(|| store.identity().to_owned());
        let identity = identity + &namespace;
        let length = 1..=MAX_IDENTITY_BYTES;
        if !length.contains(&identity.len()) || identity.contains(char::is_control) {
            let shown: String = identity.chars().take(40).collect();
            let what = format!("invalid store identity {shown:?} ({} bytes)", identity.len());
            let hint = format!(
                "set one with Builder::identity that has 1 to {MAX_IDENTITY_BYTES} bytes, and no \
                 control characters"
            );
            let error = Error::new(ErrorKind::Config, what).with_hint(hint);
            return Err(error.with_operation("connect").with_store(store.url()));
        }
        let mut options = self.options;
        if options.label.is_empty() {
            options.label = self.label;
        }
        let core = Core::new(store, background, self.clock, options, identity);
        Ok(Client::new(core))
    }
}

impl Client {
    /// Creates a client of this store with default options; see [`Builder::store`].
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use std::sync::Arc;
    /// use leasehold::store::MemoryStore; // or a store of your own
    /// let locks = leasehold::Client::with_store(Arc::new(MemoryStore::new()))?;
    /// locks.mutex("order:42").lock().await?.release().await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The same as [`Builder::store`].
    pub fn with_store(store: Arc<dyn Store>) -> Result<Self> {
        Builder::default().store(store)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Evict, MemoryStore};
    use crate::types::name::MAX_NAME_BYTES;

    const LONGEST: usize = MAX_NAME_BYTES / 2;

    fn locks(store: &Arc<MemoryStore>, namespace: &str) -> Result<Client> {
        Builder::default().namespace(namespace).store(store.clone())
    }

    async fn names(locks: &Client) -> Vec<String> {
        locks.list("").await.unwrap().iter().map(|lock| lock.name.as_str().into()).collect()
    }

    #[tokio::test]
    async fn each_namespace_has_its_own_locks_and_names() {
        let store = Arc::new(MemoryStore::default());
        let all = locks(&store, "").unwrap();
        let [acme, other] = ["acme/", "ac"].map(|namespace| locks(&store, namespace).unwrap());
        let ours = acme.mutex("job").try_lock().await.unwrap();
        let theirs = other.mutex("job").try_lock().await.unwrap();
        assert_eq!(ours.name().as_str(), "job");
        assert_eq!((names(&acme).await, names(&all).await.len()), (vec!["job".into()], 2));
        // "acme/job" begins with "ac" too, so it is listed as "me/job".
        assert_eq!(names(&other).await, ["job", "me/job"]);
        assert!(all.inspect("job").await.unwrap().is_none());
        assert_eq!(all.inspect("acme/job").await.unwrap().unwrap().name.as_str(), "acme/job");
        let error = acme.mutex("job").try_lock().await.unwrap_err();
        assert_eq!(error.name().unwrap().as_str(), "job");
        acme.check(&ours.sequencer()).await.unwrap();
        assert_eq!(other.check(&ours.sequencer()).await.unwrap_err().kind(), ErrorKind::Mismatch);
        // A waiter keeps its position and is notified.
        let (other, waited) = (other.mutex("job"), Duration::from_secs(60));
        let waiting = tokio::spawn(async move { other.lock_timeout(waited).await });
        while all.inspect("acjob").await.unwrap().map_or(0, |lock| lock.claims.len()) < 2 {
            tokio::task::yield_now().await;
        }
        theirs.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
        assert_eq!(acme.evict("job", Evict::Holders).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn connect_retries_only_while_the_store_is_unreachable() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static TRIES: AtomicUsize = AtomicUsize::new(0);
        let registry = || {
            Registry::default().with("late", &["late"], |url, _| {
                Box::pin(async move {
                    let kind = match TRIES.fetch_add(1, Ordering::SeqCst) {
                        _ if url == "late:no" => ErrorKind::Denied,
                        0 | 1 => ErrorKind::Unreachable,
                        _ => return Ok(Arc::new(MemoryStore::new()) as Arc<dyn Store>),
                    };
                    Err(Error::new(kind, "not yet"))
                })
            })
        };
        let connect = async |patience, url| {
            TRIES.store(0, Ordering::SeqCst);
            let builder = Builder::new(registry()).connect_timeout(patience);
            let connected = builder.connect(url).await.map_err(|e| e.kind());
            (connected.map(drop), TRIES.load(Ordering::SeqCst))
        };
        let minute = Duration::from_secs(60);
        assert_eq!(connect(minute, "late:yes").await, (Ok(()), 3));
        assert_eq!(connect(minute, "late:no").await, (Err(ErrorKind::Denied), 1));
        let soon = connect(Duration::ZERO, "late:yes").await;
        assert_eq!(soon, (Err(ErrorKind::Unreachable), 1));
    }

    #[tokio::test]
    async fn a_namespace_leaves_room_for_names() {
        let store = Arc::new(MemoryStore::default());
        for bad in ["x".repeat(LONGEST + 1), "a\n".into()] {
            assert_eq!(locks(&store, &bad).unwrap_err().kind(), ErrorKind::Config);
        }
        let locks = locks(&store, &"x".repeat(LONGEST)).unwrap();
        let room = MAX_NAME_BYTES - LONGEST;
        locks.mutex("y".repeat(room)).try_lock().await.unwrap().release().await.unwrap();
        let error = locks.mutex("y".repeat(room + 1)).try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidName);
        assert!(error.to_string().contains(&format!("at most {room} bytes")), "{error}");
    }
}
