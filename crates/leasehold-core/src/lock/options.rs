//! The options of an acquisition, set one by one.

/// The builder methods that every kind of lock has.
macro_rules! option_methods {
    () => {
        /// All of these options at once, in the place of those that were set before (but for
        /// [`on_waiting`](Self::on_waiting)). Without a label, the client's is said.
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// # use std::time::Duration;
        /// # let locks = leasehold::connect("memory:").await?;
        /// let mut nightly = leasehold::LockOptions::default();
        /// nightly.lease = Duration::from_secs(60);
        /// nightly.max_hold = Some(Duration::from_secs(3600));
        /// let guard = locks.mutex("report").options(&nightly).lock().await?;
        /// # drop(guard); Ok::<(), leasehold::Error>(()) }).unwrap();
        /// ```
        pub fn options(mut self, options: &crate::LockOptions) -> Self {
            self.handle.set_options(options.clone());
            self
        }

        /// How long a grant lasts unrenewed (default 15 s, at least 50 ms). A crashed holder's
        /// lock is free after this; a store without leases (`file:`) takes it for information.
        ///
        /// What is handed over to a waiter lasts six seconds at first, if that is less, and is renewed
        /// to a whole lease within moments; [`min_validity`](Self::min_validity) waits for that.
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// # let locks = leasehold::connect("memory:").await?;
        /// let lock = locks.mutex("a").lease(std::time::Duration::from_secs(60));
        /// # Ok::<(), leasehold::Error>(()) }).unwrap();
        /// ```
        pub fn lease(mut self, lease: std::time::Duration) -> Self {
            self.handle.options.lease = lease;
            self
        }

        /// Never renews: the hold ends when its lease does, whatever the holder is doing.
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// # let locks = leasehold::connect("memory:").await?;
        /// let lock = locks.mutex("a").lease(std::time::Duration::from_secs(60)).no_renewal();
        /// # Ok::<(), leasehold::Error>(()) }).unwrap();
        /// ```
        pub fn no_renewal(mut self) -> Self {
            self.handle.options.renew = false;
            self
        }

        /// Holds no longer than this: then the guard is lost and the lock released, even though
        /// the holder lives.
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// # let locks = leasehold::connect("memory:").await?;
        /// let lock = locks.mutex("a").max_hold(std::time::Duration::from_secs(3600));
        /// # Ok::<(), leasehold::Error>(()) }).unwrap();
        /// ```
        pub fn max_hold(mut self, longest: std::time::Duration) -> Self {
            self.handle.options.max_hold = Some(longest);
            self
        }

        /// Takes the lock only with at least this much validity left when the caller gets it.
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// # let locks = leasehold::connect("memory:").await?;
        /// let second = std::time::Duration::from_secs(1);
        /// let guard = locks.mutex("a").min_validity(second).lock().await?;
        /// assert!(guard.remaining() >= second / 2);
        /// # Ok::<(), leasehold::Error>(()) }).unwrap();
        /// ```
        pub fn min_validity(mut self, least: std::time::Duration) -> Self {
            self.handle.options.min_validity = least;
            self
        }

        /// Keeps the lock closed this long after an *unclean* end of the hold, for resources
        /// that cannot check tokens (Chubby's lock-delay; its default there is a minute).
        /// `Unsupported` where the store keeps nothing of an unclean end.
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// # let locks = leasehold::connect("memory:").await?;
        /// let lock = locks.mutex("a").lock_delay(std::time::Duration::from_secs(60));
        /// # Ok::<(), leasehold::Error>(()) }).unwrap();
        /// ```
        pub fn lock_delay(mut self, delay: std::time::Duration) -> Self {
            self.handle.options.lock_delay = delay;
            self
        }

        /// Keeps the lock taken for this long after it was granted, even when it is released
        /// earlier: once per period, on however many machines.
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// # let locks = leasehold::connect("memory:").await?;
        /// let hourly = locks.mutex("hourly").at_least(std::time::Duration::from_secs(3600));
        /// hourly.lock().await?.release().await?;
        /// assert!(hourly.try_lock().await.is_err()); // whoever asks in this hour
        /// # Ok::<(), leasehold::Error>(()) }).unwrap();
        /// ```
        pub fn at_least(mut self, period: std::time::Duration) -> Self {
            self.handle.options.at_least = period;
            self
        }

        /// Called with our place in the queue when we join it and whenever it changes, from
        /// whatever thread waits.
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// # let locks = leasehold::connect("memory:").await?;
        /// let lock = locks.mutex("a").on_waiting(|place| println!("{} before us", place.ahead));
        /// let _guard = lock.lock().await?;
        /// # Ok::<(), leasehold::Error>(()) }).unwrap();
        /// ```
        pub fn on_waiting(
            mut self,
            tell: impl Fn(crate::store::Place) + Send + Sync + 'static,
        ) -> Self {
            self.handle.on_waiting = Some(std::sync::Arc::new(tell));
            self
        }

        /// What the holder says of itself to people who look (at most 256 bytes are kept).
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// # let locks = leasehold::connect("memory:").await?;
        /// let _guard = locks.mutex("a").label("nightly report").lock().await?;
        /// let lock = locks.read("a").await?.expect("in use");
        /// assert_eq!(lock.holders().next().unwrap().holder.label, "nightly report");
        /// # Ok::<(), leasehold::Error>(()) }).unwrap();
        /// ```
        pub fn label(mut self, text: impl Into<String>) -> Self {
            self.handle.options.label = text.into();
            self
        }
    };
}
pub(crate) use option_methods;
