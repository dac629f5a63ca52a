//! To whom the store is open, and as whom we work in it.
//!
//! The root of the store says it: who may write to that directory may read and write the files in
//! it, nobody else may do either (they hold claim ids, and whoever knows one may release). So
//! whatever we make gets the root's group, the root's permissions for it, and the root's sticky
//! bit, whatever our umask and our own group are. What we made ourselves and finds itself closed
//! (an administrator opened the root later) is opened as we come by.
//!
//! Root in the store of somebody else works there as that user, with `setfsuid`: what root made
//! would be closed to the owner, and a path that a user controls must not lead root anywhere else.

use std::fs::{File, Metadata, Permissions};
use std::marker::PhantomData;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use nix::unistd::{Gid, Uid, setfsgid, setfsuid};

/// What each file of a store is open to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rights {
    files: u32,
    sticky: bool,
    group: u32,
    me: u32,
}

impl Rights {
    /// Those in the store whose root this is.
    pub(super) fn of(root: &Metadata, acting: Acting) -> Self {
        let mode = root.mode();
        Self {
            files: files_below(mode),
            sticky: mode & 0o1000 != 0,
            group: root.gid(),
            me: acting.0.map_or_else(|| rustix::process::geteuid().as_raw(), |(uid, _)| uid),
        }
    }

    #[cfg(test)]
    pub(super) fn private() -> Self {
        Self { files: 0o600, sticky: false, group: 0, me: rustix::process::geteuid().as_raw() }
    }

    /// Whether anybody but one user is meant to use the store.
    pub(super) fn is_shared(self) -> bool {
        self.files != 0o600
    }

    pub(super) fn file_mode(self) -> u32 {
        self.files
    }

    /// Others may tell a client something; nobody else may read, since reading is living.
    pub(super) fn inbox_mode(self) -> u32 {
        0o600 | (self.files & 0o022)
    }

    pub(super) fn directory_mode(self) -> u32 {
        let open = self.files | (self.files & 0o444) >> 2;
        let group = if self.is_of_group() { 0o2000 } else { 0 };
        let sticky = if self.is_shared() && self.sticky { 0o1000 } else { 0 };
        open | group | sticky
    }

    /// Where everybody may write, it does not matter whose group a file has.
    fn is_of_group(self) -> bool {
        self.files & 0o066 == 0o060
    }

    /// Opens what we made to whom the store is open. A group that we are not in cannot be given to
    /// it; then it has it from its directory, or others have no use of it and are told so.
    pub(super) fn share(self, file: &File, mode: u32) {
        if self.is_shared() {
            let _ = std::os::unix::fs::fchown(file, None, Some(self.group));
            let _ = file.set_permissions(Permissions::from_mode(mode));
        }
    }

    /// Opens a file that was made before the store was opened to others, if it is ours.
    pub(super) fn mend(self, file: &File, seen: &Metadata) {
        self.mend_to(file, seen, self.files);
    }

    /// The same for a directory.
    pub(super) fn mend_directory(self, dir: &File, seen: &Metadata) {
        self.mend_to(dir, seen, self.directory_mode());
    }

    fn mend_to(self, file: &File, seen: &Metadata, mode: u32) {
        let others = self.is_of_group() && seen.gid() != self.group;
        if seen.uid() == self.me && (seen.mode() & 0o7777 != mode || others) {
            self.share(file, mode);
        }
    }
}

/// The permissions of files below a directory of these.
fn files_below(dir: u32) -> u32 {
    let group = if dir & 0o020 != 0 { 0o060 } else { 0 };
    let others = if dir & 0o002 != 0 { 0o006 } else { 0 };
    0o600 | group | others
}

/// As whom files are touched: `None`, as who we are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Acting(Option<(u32, u32)>);

impl Acting {
    /// Root acts as the owner of the directory; everybody else as himself. `None`: root without
    /// the right to do so.
    pub(super) fn in_store(root: &Metadata) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || root.uid() == 0 {
            return Some(Self(None));
        }
        let acting = Self(Some((root.uid(), root.gid())));
        let now = acting.now();
        // What it was is all that setfsuid ever answers.
        let became = setfsuid(Uid::from_raw(u32::MAX)).as_raw();
        drop(now);
        (became == root.uid()).then_some(acting)
    }

    /// From here until what is returned is dropped, on this thread.
    pub(super) fn now(self) -> AsOwner {
        let before = self.0.map(|(uid, gid)| {
            let gid = setfsgid(Gid::from_raw(gid));
            (setfsuid(Uid::from_raw(uid)), gid)
        });
        AsOwner { before, _this_thread: PhantomData }
    }
}

/// See [`Acting::now`]. Bound to its thread, as what it changes is.
pub(super) struct AsOwner {
    before: Option<(Uid, Gid)>,
    _this_thread: PhantomData<*const ()>,
}

impl Drop for AsOwner {
    fn drop(&mut self) {
        if let Some((uid, gid)) = self.before {
            setfsuid(uid);
            setfsgid(gid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_open_to_those_whom_the_directory_is_open_to() {
        assert_eq!(files_below(0o700), 0o600);
        assert_eq!(files_below(0o755), 0o600, "claim ids are secrets");
        assert_eq!(files_below(0o2775), 0o660);
        assert_eq!(files_below(0o1777), 0o666);
        let rights = |files, sticky| Rights { files, sticky, ..Rights::private() };
        assert_eq!(rights(0o600, true).directory_mode(), 0o700);
        assert_eq!(rights(0o660, false).directory_mode(), 0o2770);
        assert_eq!(rights(0o666, true).directory_mode(), 0o1777);
        assert_eq!(rights(0o660, false).inbox_mode(), 0o620);
    }
}
