//! The options of an acquisition, set one by one.

/// The builder methods that every kind of lock has.
macro_rules! option_methods {
    () => {
        /// Sets all options at once, and replaces those that were set before, except
        /// [`on_waiting`](Self::on_waiting). If the label is empty, the client's label is used.
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

        /// Sets the lease: how long a grant lasts without a renewal. Default 15 s, minimum 50 ms.
        ///
        /// If a holder crashes, its lock is free when the lease ends. A store without leases
        /// (`file:`) only records the lease.
        ///
        /// A lock that is handed over to a waiter has a lease of at most 6 s at first, and is soon
        /// renewed to the full lease. To wait for that renewal, set
        /// [`min_validity`](Self::min_validity).
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

        /// Turns automatic renewal off. The hold ends when its lease expires, unless the holder
        /// calls [`renew`](crate::Hold::renew).
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

        /// Sets the longest time that the lock is held. When it is over, the lock is released and
        /// the guard is lost, even if the holder is still working.
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

        /// Sets the minimum remaining validity that a newly acquired lock has when the call
        /// returns.
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

        /// Sets a cooldown after an *unclean* end of the hold, such as a crash. The lock stays
        /// unavailable during the cooldown.
        ///
        /// Use a cooldown for resources that cannot check tokens. (Chubby calls this a lock-delay,
        /// with a default of one minute.) Acquiring the lock returns `Unsupported` if the store
        /// keeps no record of a crashed holder.
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

        /// Sets the minimum time that the lock stays unavailable after it was acquired, even if it
        /// is released earlier.
        ///
        /// Use it to run a job at most once per period, on any number of machines.
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// # let locks = leasehold::connect("memory:").await?;
        /// let hourly = locks.mutex("hourly").min_hold(std::time::Duration::from_secs(3600));
        /// hourly.lock().await?.release().await?;
        /// assert!(hourly.try_lock().await.is_err()); // in a cooldown for this hour
        /// # Ok::<(), leasehold::Error>(()) }).unwrap();
        /// ```
        pub fn min_hold(mut self, period: std::time::Duration) -> Self {
            self.handle.options.min_hold = period;
            self
        }

        /// Sets a function that is called with the queue position when the wait begins, and
        /// whenever the position changes. It is called on the thread that polls the future.
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// # let locks = leasehold::connect("memory:").await?;
        /// let lock = locks.mutex("a").on_waiting(|place| println!("{} ahead", place.ahead));
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

        /// Sets the label that describes the holder to people. At most 256 bytes are kept.
        ///
        /// ```
        /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
        /// # let locks = leasehold::connect("memory:").await?;
        /// let _guard = locks.mutex("a").label("nightly report").lock().await?;
        /// let lock = locks.inspect("a").await?.expect("in use");
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
