//! Making a client: of which store, under which conditions.

use std::sync::Arc;

use super::blocking;
use super::leasehold::Leasehold;
use crate::base::clock::Clock;
use crate::client::background::Background;
use crate::client::core::Core;
use crate::client::telemetry;
use crate::store::above::above;
use crate::store::open::open;
use crate::store::registry::Registry;
use crate::store::{Guarantee, Store};
use crate::words::error::{Error, ErrorKind, Result};
use crate::words::sequencer::MAX_IDENTITY_BYTES;

/// Connects with options. The default knows the store `memory:` alone; `leasehold::builder()` knows
/// all that are in the build.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use leasehold::store::Guarantee;
/// let locks = leasehold::builder()
///     .label("billing") // what people see who look at a lock
///     .require(Guarantee::Fifo)
///     .connect("memory:")
///     .await?;
/// # drop(locks); Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug, Default)]
pub struct Builder {
    label: String,
    clock: Clock,
    required: Vec<Guarantee>,
    identity: Option<String>,
    token_offset: u64,
    registry: Registry,
}

impl Builder {
    /// Of a client of one of these stores.
    pub fn new(registry: Registry) -> Self {
        Self { registry, ..Self::default() }
    }

    /// What every lock of this client says of its holder, unless the lock says otherwise.
    #[must_use]
    pub fn label(mut self, text: impl Into<String>) -> Self {
        self.label = text.into();
        self
    }

    /// Refuses to connect to a store that does not promise this.
    #[must_use]
    pub fn require(mut self, guarantee: Guarantee) -> Self {
        self.required.push(guarantee);
        self
    }

    /// What sequencers say of the store, where clients address one store in more than one way (by
    /// another host name, say): give them all the same. 1 to 1024 bytes, without control
    /// characters, and no secret.
    #[must_use]
    pub fn identity(mut self, text: impl Into<String>) -> Self {
        self.identity = Some(text.into());
        self
    }

    /// Raises all of the store's tokens by this number: for a resource whose lock moves here from a
    /// store with greater tokens, which its fence has seen and would refuse everybody for. Choose
    /// it no smaller than the greatest of them, and give it to all clients, for ever. In a URL it
    /// is the parameter `token_offset` (not of `file:` and `memory:`). docs/fencing.md has the
    /// steps.
    #[must_use]
    pub fn token_offset(mut self, offset: u64) -> Self {
        self.token_offset = offset;
        self
    }

    /// Judges leases by this clock; for tests.
    #[must_use]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// Connects to the store of this URL.
    ///
    /// # Cancel safety
    /// Dropped, nothing is left of it.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a URL that cannot work, [`ErrorKind::Unsupported`] for a store
    /// that this build leaves out, or for a guarantee that was [required](Self::require) and is not
    /// given; otherwise as the store fails.
    pub async fn connect(self, url: impl AsRef<str>) -> Result<Leasehold> {
        let background = Background::start()?;
        let opened = open(url.as_ref(), &self.registry, background.handle());
        let store = background.with_runtime(opened).await?;
        self.start(store, background)
    }

    /// As [`connect`](Self::connect), for code without a runtime.
    ///
    /// # Errors
    /// As there.
    pub fn connect_blocking(self, url: impl AsRef<str>) -> Result<blocking::Leasehold> {
        let background = Background::start()?;
        let opened = open(url.as_ref(), &self.registry, background.handle());
        let store = blocking::block_on(&background, opened)?;
        self.start(store, background).map(Into::into)
    }

    /// A client of a store of your own.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn store(self, store: Arc<dyn Store>) -> Result<Leasehold> {
        self.start(store, Background::start()?)
    }

    /// A client that is one process of a simulation.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    #[cfg(feature = "simulation")]
    #[doc(hidden)]
    pub fn simulated(self, store: Arc<dyn Store>, world: &crate::World) -> Result<Leasehold> {
        self.start(store, Background::inside(world.clone()))
    }

    fn start(self, store: Arc<dyn Store>, background: Background) -> Result<Leasehold> {
        telemetry::describe();
        let url = store.url().to_owned();
        let store = above(store, self.token_offset).map_err(|e| e.during("connect").at(&url))?;
        for wanted in self.required {
            if !store.guarantees().meets(wanted) {
                let what = format!("this store does not promise {wanted}: choose another");
                return Err(Error::new(ErrorKind::Unsupported, what)
                    .during("connect")
                    .at(store.url()));
            }
        }
        let identity = self.identity.unwrap_or_else(|| store.identity().to_owned());
        let length = 1..=MAX_IDENTITY_BYTES;
        if !length.contains(&identity.len()) || identity.contains(char::is_control) {
            let what = "a store's identity is 1 to 1024 bytes without control characters: set one";
            return Err(Error::new(ErrorKind::Config, what).during("connect").at(store.url()));
        }
        let core = Core::new(store, background, self.clock, self.label, identity);
        Ok(Leasehold::new(core))
    }
}

impl Leasehold {
    /// A client of this store, with the default options; see [`Builder::store`].
    ///
    /// # Errors
    /// As there.
    pub fn with_store(store: Arc<dyn Store>) -> Result<Self> {
        Builder::default().store(store)
    }
}
